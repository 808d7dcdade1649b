"""Runs one program as a systemd service: until ready, while healthy, and through its drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvduplex.errors import EngineFailedError
from kvduplex.node.notify import Notifier
from kvduplex.supervise.child import Child
from kvduplex.supervise.health import answers_ok
from kvduplex.supervise.logs import probable_cause, tail
from kvduplex.supervise.unit import Unit

__all__ = ["Pace", "Service"]

_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class Pace:
    """How often and how long, in seconds.

    Attributes:
        start_s: Longest start.
        probe_s: Between two looks at the program's health.
        drain_s: Longest drain.
        grace_s: Between asking the program to end and forcing it.
    """

    start_s: float
    probe_s: float = 2.0
    drain_s: float = 120.0
    grace_s: float = 20.0


class Service:
    """One program from its start to its end.

    Args:
        unit: The program.
        environment: What it inherits.
        notifier: Who is told how it is.
        pace: Deadlines.
        stop: Set when the service is to end.
        busy: Says what the program still has to do, or None when it is idle; asked while draining.
        clock: Monotonic seconds.
        starting: Whether the program has yet to start serving, when its address cannot tell because another answers
            there as well.

    Attributes:
        ready: Set once the program serves.
    """

    def __init__(
        self,
        unit: Unit,
        *,
        environment: Mapping[str, str],
        notifier: Notifier,
        pace: Pace,
        stop: asyncio.Event,
        busy: Callable[[], Awaitable[str | None]],
        clock: Callable[[], float],
        starting: Callable[[], bool] | None = None,
    ) -> None:
        self.ready = asyncio.Event()
        self._unit = unit
        self._child = Child(unit, environment=environment, grace_s=pace.grace_s)
        self._notifier = notifier
        self._pace = pace
        self._stop = stop
        self._busy = busy
        self._clock = clock
        self._starting = starting or (lambda: False)

    async def run(self) -> None:
        """Start the program, keep it, drain it, end it. Leaves nothing behind, however it returns.

        Raises:
            EngineFailedError: The program died, or was not ready in time; the message quotes its log.
        """
        await self._child.start()
        try:
            await self._until_ready()
            await self._while_healthy()
            await self._drain()
        finally:
            self._notifier.extend(self._pace.grace_s + 10)
            self._child.ask("stop")
            await self._child.gone()

    async def _until_ready(self) -> None:
        deadline = self._clock() + self._pace.start_s
        url = self._unit.url + self._unit.health_path
        while not self._stop.is_set():
            # More than one probe ahead, so that a late one is not taken for a hang.
            self._notifier.extend(30 + 2 * self._pace.probe_s)
            if not self._starting() and await answers_ok(url):
                self.ready.set()
                self._notifier.ready(f"{self._unit.name} serves at {self._unit.url}")
                return
            if self._clock() >= deadline:
                raise EngineFailedError(f"{self._unit.name}: not ready after {self._pace.start_s:g} s\n{self._log()}")
            await self._pause()

    async def _while_healthy(self) -> None:
        while not self._stop.is_set():
            # A program that stops answering is not fed, and systemd starts it anew.
            if await answers_ok(self._unit.url + self._unit.health_path):
                self._notifier.alive()
            await self._pause()

    async def _drain(self) -> None:
        self._notifier.stopping(f"{self._unit.name} drains")
        deadline = self._clock() + self._pace.drain_s
        while self._clock() < deadline and not self._child.fate.done():
            self._notifier.extend(30 + 2 * self._pace.probe_s)
            if (what := await self._busy()) is None:
                return
            self._notifier.status(f"{self._unit.name} drains: {what}")
            await self._sleep(self._pace.probe_s)

    async def _pause(self) -> None:
        """Wait for the next probe, the order to stop, or the program's end.

        Raises:
            EngineFailedError: The program ended.
        """
        stopping = asyncio.ensure_future(self._stop.wait())
        events: set[asyncio.Future[Any]] = {stopping, self._child.fate}
        try:
            await asyncio.wait(events, timeout=self._pace.probe_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._child.fate.done() and not self._stop.is_set():
            raise EngineFailedError(f"{self._unit.name} {self._child.fate.result().text}\n{self._log()}")

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._child.fate)

    def _log(self) -> str:
        cause = probable_cause(self._unit.log)
        lines = [f"probable cause: {cause}"] if cause else []
        return "\n".join([*lines, f"end of {self._unit.log}:", *tail(self._unit.log, _LOG_LINES)])
