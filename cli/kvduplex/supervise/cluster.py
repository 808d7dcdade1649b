"""Programs that live and die together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from kvduplex.errors import EngineFailedError
from kvduplex.supervise.affinity import confine
from kvduplex.supervise.child import Child
from kvduplex.supervise.health import answers_ok
from kvduplex.supervise.logs import StageFollower, probable_cause, tail
from kvduplex.supervise.progress import Progress
from kvduplex.supervise.unit import Unit

__all__ = ["STOP_GRACE_S", "Cluster"]

STOP_GRACE_S = 5.0
"""Seconds a program has to end by itself; with what follows, everything has ended within ten."""

_FORCED_END_S = 2.5  # beyond the grace: for the guards, which by then wait for trackers and the kernel
_POLL_S = 0.25
_TAIL_LINES = 20


class Cluster:
    """Starts units, waits until they are ready, notices the first that dies, and ends them all.

    Args:
        environment: What every program inherits.
        progress: Told what happens.
        grace_s: Seconds between asking programs to end and forcing them.
        healthy: How to ask a URL whether it answers.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        progress: Progress,
        grace_s: float = STOP_GRACE_S,
        healthy: Callable[[str], Awaitable[bool]] = answers_ok,
    ) -> None:
        self._environment = environment
        self._progress = progress
        self._grace_s = grace_s
        self._healthy = healthy
        self._children: list[Child] = []

    @property
    def pids(self) -> dict[str, int]:
        """Process id of every program that was started, by unit name."""
        return {child.unit.name: child.pid for child in self._children if child.pid is not None}

    async def start(self, units: Sequence[Unit], *, timeout_s: float) -> None:
        """Start `units` together and return when all of them answer.

        Raises:
            EngineFailedError: One died or was not ready in time; names it, its stage, its log and the log's end.
            OSError: A log or a scratch folder cannot be made.
        """
        children = [Child(unit, environment=self._environment, grace_s=self._grace_s) for unit in units]
        self._children += children
        await _all(self._start_one(child, timeout_s) for child in children)

    async def watch(self) -> None:
        """Wait for the first program to die, and raise.

        Raises:
            EngineFailedError: Names it, its log and the log's end.
        """
        await asyncio.wait([child.fate for child in self._children], return_when=asyncio.FIRST_COMPLETED)
        raise self._death(next(child for child in self._children if child.fate.done()))

    async def close(self, hurry: asyncio.Event | None = None) -> None:
        """End every program and everything that they started. Once `hurry` is set, without grace."""
        for child in reversed(self._children):
            child.ask("stop")
        gone = asyncio.gather(*(child.gone() for child in self._children))
        hurrying = asyncio.ensure_future((hurry or asyncio.Event()).wait())
        either: set[asyncio.Future[Any]] = {gone, hurrying}
        try:
            await asyncio.wait(either, timeout=self._grace_s + _FORCED_END_S, return_when=asyncio.FIRST_COMPLETED)
            for child in self._children:
                child.ask("kill")
            await asyncio.wait({gone}, timeout=_FORCED_END_S)
            for child in self._children:
                await child.destroy()
            await gone
        finally:
            hurrying.cancel()

    async def _start_one(self, child: Child, timeout_s: float) -> None:
        follower = StageFollower(child.unit.log, child.unit.stages)
        try:
            async with asyncio.timeout(timeout_s):
                await child.start()
                self._progress.stage(child.unit.name, follower.label)
                await self._until_ready(child, follower)
        except TimeoutError:
            raise EngineFailedError(
                f"{child.unit.name} was not ready after {timeout_s:g} s (stage: {follower.label}). "
                f"If it only needs longer, raise --timeout.\n{_quote(child)}"
            ) from None
        if child.unit.cores and child.pid is not None:
            confine(child.pid, child.unit.cores)
        self._progress.ready(child.unit.name)

    async def _until_ready(self, child: Child, follower: StageFollower) -> None:
        while True:
            await asyncio.wait([child.fate], timeout=_POLL_S)
            self._progress.stage(child.unit.name, follower.update())
            if child.fate.done():
                raise self._death(child, follower.label)
            if await self._healthy(child.unit.url + child.unit.health_path):
                return

    @staticmethod
    def _death(child: Child, stage: str | None = None) -> EngineFailedError:
        during = f" while {stage}" if stage else ""
        cause = probable_cause(child.unit.log)
        reason = f"\nIts log names: {cause}" if cause else ""
        what = f"{child.unit.name} {child.fate.result().text}{during}; everything else was stopped."
        return EngineFailedError(f"{what}{reason}\n{_quote(child)}")


def _quote(child: Child) -> str:
    lines = tail(child.unit.log, _TAIL_LINES)
    if not lines:
        return f"Its log {child.unit.log} is empty."
    return "\n".join([f"Last lines of {child.unit.log}:", *(f"  {line}" for line in lines)])


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Await all; on the first error cancel the others and raise it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
