"""Runs a cluster until somebody wants it to end or something in it dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvduplex.supervise.cluster import STOP_GRACE_S, Cluster
from kvduplex.supervise.progress import Progress
from kvduplex.supervise.unit import Unit

__all__ = ["supervise"]

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class _Interrupts:
    """The first signal asks for an orderly end, the second for one without grace."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def arrive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def supervise(
    waves: Sequence[Sequence[Unit]],
    *,
    environment: Mapping[str, str],
    progress: Progress,
    on_ready: Callable[[Mapping[str, int]], None],
    timeout_s: float,
    grace_s: float = STOP_GRACE_S,
) -> None:
    """Start one wave of units after the other, then run until SIGINT, SIGTERM or SIGHUP, or until a program dies.

    Whatever happens, nothing that was started is left when this returns.

    Args:
        waves: Units of one wave start together; the next wave starts when all of them answer.
        environment: What every program inherits.
        progress: Told what happens.
        on_ready: Called once with every program's process id by unit name, when the last wave answers.
        timeout_s: Seconds each unit has to become ready.
        grace_s: Seconds between asking programs to end and forcing them.

    Raises:
        EngineFailedError: A program died or was not ready in time.
        OSError: A log or a scratch folder cannot be made.
    """
    cluster = Cluster(environment=environment, progress=progress, grace_s=grace_s)
    with _interrupts() as interrupts:
        work = asyncio.create_task(_run(cluster, waves, progress, on_ready, timeout_s))
        asked = asyncio.create_task(interrupts.first.wait())
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            progress.close()
            progress.say("stopping; press Ctrl-C again to force it")
        finally:
            for task in (work, asked):
                task.cancel()
            await asyncio.gather(work, asked, return_exceptions=True)
            await cluster.close(hurry=interrupts.second)


async def _run(
    cluster: Cluster,
    waves: Sequence[Sequence[Unit]],
    progress: Progress,
    on_ready: Callable[[Mapping[str, int]], None],
    timeout_s: float,
) -> None:
    for units in waves:
        await cluster.start(units, timeout_s=timeout_s)
    progress.close()
    on_ready(cluster.pids)
    await cluster.watch()


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    loop = asyncio.get_running_loop()
    interrupts = _Interrupts()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, interrupts.arrive)
    try:
        yield interrupts
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
