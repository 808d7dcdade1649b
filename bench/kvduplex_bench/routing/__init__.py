"""Routing policies beside each other, over simulated engines, on the same traces."""
