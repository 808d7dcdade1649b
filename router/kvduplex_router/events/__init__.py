"""What engines say about their KV caches, and the index of it."""
