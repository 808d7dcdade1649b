"""One turn over a prefill and a decode engine: shaping, both hops, the stream, failures."""
