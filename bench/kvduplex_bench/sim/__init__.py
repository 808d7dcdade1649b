"""Simulated engines: vLLM's interfaces and timing without a model, for scale, policies and failures.

`core` is pure and takes its time from whoever drives it: the HTTP shell in `http` and `server` with a real clock, the
large simulations with a virtual one.
"""
