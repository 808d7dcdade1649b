"""What the simulated engines refuse."""

from __future__ import annotations

from kvduplex_bench.errors import BenchError

__all__ = ["ProfileError", "SimError"]


class SimError(BenchError):
    """A simulated engine cannot be started, or was asked for what it does not do."""


class ProfileError(SimError):
    """A timing profile cannot be read."""
