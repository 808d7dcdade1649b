"""What the router reports about itself."""
