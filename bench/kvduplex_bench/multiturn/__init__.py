"""The multi-turn benchmark: the same conversations with and without reuse, timed where clients are."""
