"""Probes every engine's ``/health`` in turn, and says which may be used.

Busy is not dead: an engine that times out on the probe but has answered a request since the last one stays up, and a
probe never touches a stream in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvduplex_router.clock import Clock
from kvduplex_router.config import HealthConfig
from kvduplex_router.fleet.engine import Engine, EngineHealth
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.fleet.inquiry import Asker
from kvduplex_router.fleet.traits import read_load

__all__ = ["HealthProber"]

_log = logging.getLogger("kvduplex.router.health")
_DESCRIBE_S = 10.0
"""Between questions what an engine is, for one may be replaced at its address between two probes."""


class HealthProber:
    """Keeps `Engine.health`, `Engine.traits` and `Engine.load` current, health with hysteresis in both directions.

    Attributes:
        on_up: Called when an engine can be used again, for the sake of those who wait for one.
    """

    def __init__(self, fleet: Fleet, config: HealthConfig, *, clock: Clock, headers: bytes = b"") -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._asker = Asker(headers, timeout_s=config.timeout_s)
        self._streak: dict[Engine, int] = {}
        self.on_up: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Probe until cancelled, each engine on its own so that a silent one delays no other."""
        async with asyncio.TaskGroup() as group:
            self._fleet.subscribe(lambda engine, joined: self._start(group, engine) if joined else None)
            await asyncio.get_running_loop().create_future()

    def _start(self, group: asyncio.TaskGroup, engine: Engine) -> None:
        group.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        try:
            while not engine.gone or engine.in_flight:
                if not engine.gone:
                    await self.probe(engine)
                await asyncio.sleep(self._config.interval_s)
        finally:
            self._streak.pop(engine, None)
            if engine.gone:
                engine.pool.close()

    async def probe(self, engine: Engine) -> None:
        """Probe one engine once and judge it."""
        began = self._clock()
        good = await self._asker.healthy(engine)
        if good is None:  # silent: alive when it answered anything in the meantime
            good = engine.answered_at >= began - self._config.interval_s
        elif good:
            await self._ask_more(engine)
        self.judge(engine, good=good)

    async def _ask_more(self, engine: Engine) -> None:
        """Ask what it is before it is used, and each time what it has to do."""
        exposition = await self._asker.exposition(engine)
        now = self._clock()
        if engine.traits is None or engine.health is not EngineHealth.UP or now - engine.described_at >= _DESCRIBE_S:
            before, engine.traits = engine.traits, await self._asker.traits(engine, exposition or "")
            engine.described_at = now
            if engine.traits != before and not engine.gone:
                self._fleet.regroup()
        if exposition is not None:
            engine.load = read_load(exposition, self._clock())

    def judge(self, engine: Engine, *, good: bool) -> None:
        """Count one probe's result and change the engine's state when the streak is long enough."""
        streak = self._streak.get(engine, 0)
        streak = max(streak, 0) + 1 if good else min(streak, 0) - 1
        self._streak[engine] = streak
        before = engine.health
        if streak >= self._config.up_after or (good and before is EngineHealth.UNKNOWN):
            engine.health = EngineHealth.UP
        elif -streak >= self._config.down_after or (not good and before is EngineHealth.UNKNOWN):
            engine.health = EngineHealth.DOWN
        if engine.health is not before:
            level = logging.WARNING if engine.health is EngineHealth.DOWN else logging.INFO
            _log.log(level, "%s engine %s is %s", engine.role.value, engine.name, engine.health.value)
            if engine.health is EngineHealth.UP:
                self.on_up()
