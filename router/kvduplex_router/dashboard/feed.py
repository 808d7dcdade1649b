"""Looks at the router while somebody watches, and hands every look to all who do."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import orjson

from kvduplex_router.clock import Clock
from kvduplex_router.dashboard.samples import Sample, parse, summary
from kvduplex_router.fleet.breaker import BreakerState
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import Fleet

__all__ = ["Feed"]

_log = logging.getLogger("kvduplex.router.dashboard")
_WINDOW_S: Final = 30.0
_EVENT: Final = b"event: look\ndata: %b\n\n"


class Feed:
    """See the module.

    Args:
        fleet: The engines.
        metrics: The text exposition of the whole router.
        clock: Monotonic seconds.
        interval_s: Between looks.
        version: Of the router.
        troubles: What hit rates suffer from, by class, in words.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: Callable[[], Awaitable[bytes]],
        *,
        clock: Clock,
        interval_s: float = 2.0,
        version: str = "",
        troubles: Callable[[], Awaitable[Mapping[str, str]]],
    ) -> None:
        self._troubles = troubles
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._interval_s = interval_s
        self._version = version
        self._samples: deque[Sample] = deque()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()
        self._latest: bytes | None = None
        self._number = 0
        self._closed = False

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, one a look, until the watcher leaves or the feed is closed."""
        self._watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_forever())
        seen = 0
        try:
            yield b"retry: 2000\n\n"
            while not self._closed:
                async with self._news:
                    while self._number == seen and not self._closed:
                        await self._news.wait()
                seen = self._number
                if self._latest is not None and not self._closed:
                    yield self._latest
        finally:
            self._watchers -= 1

    async def close(self) -> None:
        """End all streams."""
        self._closed = True
        async with self._news:
            self._news.notify_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look_forever(self) -> None:
        self._samples.clear()
        while self._watchers and not self._closed:
            try:
                self._latest = _EVENT % orjson.dumps(await self.look())
            except Exception:  # noqa: BLE001 - a task boundary; one look that fails must not end the others
                _log.warning("dashboard: a look failed", exc_info=True)
                self._latest = None
            self._number += 1
            async with self._news:
                self._news.notify_all()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> dict[str, Any]:
        """What there is to see now; amounts are those of the last half minute."""
        now = parse(await self._metrics(), self._clock())
        before = self._samples[0] if self._samples else None
        self._samples.append(now)
        while len(self._samples) > 1 and now.at - self._samples[1].at >= _WINDOW_S:
            self._samples.popleft()
        in_flight = now.by("in_flight", "engine")
        return {
            "version": self._version,
            "ready": not self._fleet.missing(),
            "missing": self._fleet.missing(),
            **summary(now, before),
            "troubles": await self._troubles(),
            "engines": [_engine(engine, in_flight.get(engine.name)) for engine in self._fleet.engines],
        }


def _engine(engine: Engine, in_flight: float | None) -> dict[str, Any]:
    load, traits = engine.load, engine.traits
    return {
        "name": engine.name,
        "role": engine.role.value,
        "health": engine.health.value,
        "usable": engine.usable,
        "breaker_open": engine.breaker.state is not BreakerState.CLOSED,
        "why": sorted(engine.shut_because.values()),
        "in_flight": in_flight,
        "running": None if load is None else load.running,
        "waiting": None if load is None else load.waiting,
        "kv_usage": None if load is None else load.kv_usage,
        "server": None
        if traits is None or traits.server is None
        else f"{traits.server} {traits.version or ''}".strip(),
        "model": None if traits is None else traits.model,
        "block_size": None if traits is None else traits.block_size,
    }
