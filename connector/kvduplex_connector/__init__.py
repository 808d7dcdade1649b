"""Bidirectional vLLM connector; runs inside vLLM."""
