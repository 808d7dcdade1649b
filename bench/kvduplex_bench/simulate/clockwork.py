"""Virtual time: what happens next, and engines that step through it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection
from typing import Final

from kvduplex_bench.sim.core.engine import EngineCore
from kvduplex_bench.sim.core.scheduler import Step
from kvduplex_bench.sim.core.sequence import Work
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_transfer.leases.params import Retention
from kvduplex_transfer.leases.records import LeaseLimits

__all__ = ["Agenda", "VirtualEngine"]

_MANY: Final = 1 << 20


class Agenda:
    """Things to do, in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._background = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do `act` at `when`, and not before what was entered for the same time."""
        heapq.heappush(self._due, (max(when, self.now), next(self._order), act))

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Do `act` again and again, for as long as there is anything else to do."""

        def again() -> None:
            act()
            self.at(self.now + seconds, again)

        self._background += 1
        self.at(self.now + seconds, again)

    def run(self, until: float = float("inf")) -> None:
        """Do everything up to `until`."""
        while len(self._due) > self._background and self._due[0][0] <= until:
            self.now, _, act = heapq.heappop(self._due)
            act()


class VirtualEngine:
    """An engine on an agenda.

    Args:
        timing: How long things take.
        agenda: Its time.
        caching: Whether its prefix cache is on.
        leases: Bounds of its lease table.
        after_step: Called after each step, to publish what changed; the engine keeps its events for it.
    """

    def __init__(
        self,
        timing: Timing,
        agenda: Agenda,
        *,
        caching: bool = True,
        leases: LeaseLimits | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.core = EngineCore(
            timing, clock=lambda: agenda.now, caching=caching, leases=leases, recording=after_step is not None
        )
        self._agenda = agenda
        self._after_step = after_step
        self._step: Step | None = None
        self._turn = 0
        self._done: dict[Work, Callable[[Work, float], None]] = {}
        self._first: dict[Work, Callable[[], None]] = {}
        self.in_flight = 0

    @property
    def tokens_in_flight(self) -> int:
        """Prompt tokens of all requests here, generated ones left out."""
        return sum(work.prompt_tokens for work in self._done)

    @property
    def tokens_to_compute(self) -> int:
        """Prompt tokens that are neither computed nor, for requests with blocks, found in the cache."""
        return sum(max(0, work.prompt_tokens - work.computed) for work in self._done)

    @property
    def works(self) -> Collection[Work]:
        """All requests here."""
        return self._done.keys()

    @property
    def step_left_s(self) -> float:
        """Seconds until a request that came now would be looked at."""
        step = self._step
        if step is None:
            return 0.0
        left = max(0.0, step.ends - self._agenda.now)
        return left if step.count == 1 else left % step.each_s

    def computing(self, work: Work) -> int:
        """Prompt tokens of `work` in the step under way."""
        return 0 if self._step is None else sum(tokens for each, tokens in self._step.chunks if each is work)

    def submit(
        self,
        work: Work,
        done: Callable[[Work, float], None],
        *,
        retention: Retention | None = None,
        send_s: float | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Take in a request; call `first` when it has its first token, and `done` with it and the time of its end."""
        work.arrived = self._agenda.now
        self._done[work] = done
        if first is not None:
            self._first[work] = first
        self.in_flight += 1
        self.core.submit(work, retention=retention, send_s=send_s)
        self._look()

    def _look(self) -> None:
        """Something came: begin, or let what runs end sooner."""
        if self._step is None:
            self._begin()
        elif self._step.count > 1:
            self.core.scheduler.cut(self._step, self._agenda.now)
            self._schedule_end()

    def _begin(self) -> None:
        self._step = step = self.core.begin(self._agenda.now, _MANY)
        if step is not None:
            due = self.core.scheduler.next_load()
            if due is not None:
                self.core.scheduler.cut(step, due)
            self._schedule_end()
        elif (due := self.core.scheduler.next_load()) is not None:
            self._turn += 1
            turn = self._turn
            self._agenda.at(due, lambda: self._begin() if turn == self._turn and self._step is None else None)

    def _schedule_end(self) -> None:
        assert self._step is not None  # noqa: S101 - its callers have one
        self._turn += 1
        turn, ends = self._turn, self._step.ends
        self._agenda.at(ends, lambda: self._end() if turn == self._turn else None)

    def _end(self) -> None:
        step, self._step = self._step, None
        assert step is not None  # noqa: S101 - only the turn of a step comes here
        self.core.end(step)
        if self._after_step is not None:
            self._after_step()
        for work in step.first:
            if (first := self._first.pop(work, None)) is not None:
                first()
        finished = [(work, self._done.pop(work)) for work in step.finished]
        self.in_flight -= len(finished)
        for work, done in finished:
            done(work, step.ends)
        if self._step is None:
            self._begin()
