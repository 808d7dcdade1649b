"""The one clock of the router's logic, injected so that tests own time."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Clock"]

Clock = Callable[[], float]
"""Monotonic seconds, as from `time.monotonic`; never wall-clock time."""
