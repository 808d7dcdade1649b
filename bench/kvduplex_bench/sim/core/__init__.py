"""The pure core of a simulated engine: blocks, continuous batching, timing. No I/O, no clock of its own."""
