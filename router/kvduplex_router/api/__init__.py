"""HTTP endpoints: what clients and operators call."""
