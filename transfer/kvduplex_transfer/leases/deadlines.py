"""A queue of moments at which something may have to end. Early entries are harmless, late ones are impossible."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["Deadlines"]

_T = TypeVar("_T")
_SLACK: Final = 1024


class Deadlines(Generic[_T]):
    """Items by the time they are to be looked at again.

    An item whose end moved is not searched for: it comes up at its old time, is found alive and is entered again.

    Args:
        is_alive: Whether an item still has an end to wait for; others are forgotten when they get too many.
    """

    __slots__ = ("_count", "_heap", "_is_alive")

    def __init__(self, is_alive: Callable[[_T], bool]) -> None:
        self._is_alive = is_alive
        self._heap: list[tuple[float, int, _T]] = []
        self._count = 0

    @property
    def next(self) -> float:
        """The earliest time entered; infinite when there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def enter(self, when: float, item: _T) -> None:
        """Look at `item` at `when`."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, item))

    def take(self, now: float) -> _T | None:
        """An item whose time has come, or None."""
        if not self._heap or self._heap[0][0] > now:
            return None
        return heapq.heappop(self._heap)[2]

    def trim(self, alive: int) -> None:
        """Forget items that ended otherwise, once they are many more than the `alive` ones."""
        if len(self._heap) > 4 * alive + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_alive(entry[2])]
            heapq.heapify(self._heap)
