"""Until when a read in flight may be trusted."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ReadDeadlines"]


class ReadDeadlines:
    """Remembers until when each read in flight may be trusted.

    Args:
        clock: Monotonic seconds of this process. Budgets are durations, so the scheduler's clock may differ; the time a
            budget spends on its way is not noticed, which `begin`'s `slack_s` allows for.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reads: dict[str, tuple[float, frozenset[int]]] = {}

    def begin(self, request_id: str, budget_s: float, local_blocks: frozenset[int], *, slack_s: float = 0.5) -> None:
        """A read into `local_blocks` begins and may be trusted for `budget_s` seconds."""
        self._reads[request_id] = (self._clock() + budget_s - slack_s, local_blocks)

    def end(self, request_ids: set[str]) -> dict[str, frozenset[int]]:
        """Reads ended; returns the local blocks of those that took too long, by request."""
        now = self._clock()
        ended = {request_id: self._reads.pop(request_id) for request_id in request_ids & self._reads.keys()}
        return {request_id: blocks for request_id, (deadline, blocks) in ended.items() if now > deadline}
