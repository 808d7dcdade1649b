"""Deploys disaggregated prefill/decode serving: starts engines and router, checks hosts, measures."""

__version__ = "0.1.0"
