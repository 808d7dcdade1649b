"""The HTTP shell of a simulated engine: what vLLM serves, over the pure core."""
