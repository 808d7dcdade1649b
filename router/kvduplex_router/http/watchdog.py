"""One timer for many deadlines.

A timer per awaited chunk costs more than forwarding the chunk. Each watched object carries one number instead, and a
single periodic tick compares it; deadlines are therefore late by up to one tick, which no limit here minds.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

__all__ = ["NEVER", "Watchdog", "Watched"]

NEVER = math.inf


class Watched(Protocol):
    """Something with a deadline in the event loop's time, in seconds; `NEVER` while it has none."""

    deadline: float

    def on_deadline(self) -> None:
        """Called once per tick while the deadline lies in the past; must not raise."""


class Watchdog:
    """Compares the deadlines of all added objects every `tick_s` seconds; idle while there are none."""

    def __init__(self, *, tick_s: float = 0.25) -> None:
        self._tick_s = tick_s
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ticking(self) -> bool:
        """Whether the timer runs."""
        return self._timer is not None

    def add(self, item: Watched) -> None:
        """Begin to watch `item`."""
        self._watched.add(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def discard(self, item: Watched) -> None:
        """Stop watching `item`; unknown items are ignored."""
        self._watched.discard(item)

    def close(self) -> None:
        """Forget everything and stop the timer."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for item in [item for item in self._watched if item.deadline <= now]:
            item.on_deadline()
        self._timer = loop.call_later(self._tick_s, self._tick) if self._watched else None
