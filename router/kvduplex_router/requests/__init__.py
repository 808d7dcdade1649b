"""Requests as the router reads them: bodies kept as bytes, and the APIs they belong to."""
