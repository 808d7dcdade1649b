"""Multi-turn benchmarks and measurements."""
