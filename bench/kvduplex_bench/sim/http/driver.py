"""Runs the core on the event loop: sleeps through its steps, and tells those who wait for tokens.

Steps follow each other on the profile's own time, so a late wake-up delays an answer once and never the answers after
it. How late wake-ups were is counted: a simulation that cannot keep up must not be believed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from kvduplex_bench.sim.core.engine import EngineCore
from kvduplex_bench.sim.core.scheduler import Step
from kvduplex_bench.sim.core.sequence import Work

__all__ = ["Driver", "Listener"]


class Listener(Protocol):
    """Who waits for a request's tokens."""

    def progress(self, generated: int, finished: bool) -> None:
        """So many tokens have been generated altogether."""


class Driver:
    """Drives one engine.

    Args:
        core: The engine.
        time_scale: Seconds of the clock for one second of the profile.
        stream_interval: Steps after which streams are told of new tokens.
        after_step: Called after each step, to publish what changed.
    """

    def __init__(
        self, core: EngineCore, *, time_scale: float, stream_interval: int, after_step: Callable[[], None]
    ) -> None:
        self._core = core
        self._scale = time_scale
        self._interval = stream_interval
        self._after_step = after_step
        self._listeners: dict[Work, Listener] = {}
        self._wake = asyncio.Event()
        self._cut = asyncio.Event()
        self._step: Step | None = None
        self.lag_s = 0.0
        """Longest lateness of a step's end so far, in seconds of the clock."""
        self.late_s = 0.0
        """Lateness of all steps' ends together, in seconds of the clock."""
        self.steps = 0
        """Steps ended so far."""

    def listen(self, work: Work, listener: Listener) -> None:
        """Tell `listener` of the tokens of `work` until it is finished or forgotten."""
        self._listeners[work] = listener

    def forget(self, work: Work) -> None:
        """Tell nobody of `work` any more."""
        self._listeners.pop(work, None)

    def wake(self) -> None:
        """Something was submitted: it is looked at after the step under way, however many are planned at once."""
        self._wake.set()
        if self._step is not None and self._step.count > 1:
            self._core.scheduler.cut(self._step, self.now())
            self._cut.set()

    def now(self) -> float:
        """The time in the profile's seconds."""
        return asyncio.get_running_loop().time() / self._scale

    async def run(self) -> None:
        """Drive until cancelled."""
        at = self.now()
        while True:
            self._wake.clear()
            step = self._core.begin(at, self._interval)
            if step is None:
                await self._idle(at)
                at = self.now()
                continue
            await self._through(step)
            self._core.end(step)
            self._tell(step.first, step.finished)
            self._after_step()
            at = step.ends
            late_s = (self.now() - at) * self._scale
            self.late_s, self.steps = self.late_s + late_s, self.steps + 1
            self.lag_s = max(self.lag_s, late_s)

    def _tell(self, first: list[Work], finished: list[Work]) -> None:
        listeners, number = self._listeners, self._core.scheduler.step_number
        for work in finished:
            if (listener := listeners.pop(work, None)) is not None:
                listener.progress(work.output_tokens, finished=True)
        for work in self._core.scheduler.decoding:
            if (listener := listeners.get(work)) is not None:
                listener.progress(work.generated(number), finished=False)
        del first

    async def _idle(self, at: float) -> None:
        """Wait for a request, or for KV that is being read."""
        due = self._core.scheduler.next_load()
        wait_s = None if due is None else max(0.0, due - max(at, self.now())) * self._scale
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _through(self, step: Step) -> None:
        """Sleep to the end of `step`, which may come to lie earlier meanwhile."""
        self._step = step
        try:
            while (left_s := (step.ends - self.now()) * self._scale) > 0:
                self._cut.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._cut.wait()
        finally:
            self._step = None
