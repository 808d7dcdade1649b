"""The error tree of the benchmarks."""

from __future__ import annotations

__all__ = ["BenchError", "ClusterError", "UnreachableError"]


class BenchError(Exception):
    """A measurement could not be made; the message says what to do."""


class UnreachableError(BenchError):
    """An engine or router does not answer."""


class ClusterError(BenchError):
    """The cluster to be measured did not start, or ended early."""
