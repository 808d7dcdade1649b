"""Leases: a decode engine's promise to keep KV blocks, and the protocol that claims them."""
