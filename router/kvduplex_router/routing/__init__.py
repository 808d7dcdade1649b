"""Which engine serves a hop."""
