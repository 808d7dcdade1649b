"""Probes every engine's ``/health`` in turn, and says which may be used.

Busy is not dead: an engine that times out on the probe but has answered a request since the last one stays up, and a
probe never touches a stream in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvduplex_router.clock import Clock
from kvduplex_router.config import HealthConfig
from kvduplex_router.fleet.engine import Engine, EngineHealth
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.fleet.inquiry import Asker
from kvduplex_router.fleet.ranks import RankKeeper
from kvduplex_router.fleet.traits import Traits, read_load, read_ranks

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
        self._ranks = RankKeeper()
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
                if not engine.gone and (ranks := self._fleet.ranks(engine))[0] is engine:  # one asks for them all
                    await self.probe(*ranks)
                await asyncio.sleep(self._config.interval_s)
        finally:
            self._streak.pop(engine, None)
            self._ranks.forget(engine)
            if engine.gone:
                engine.pool.close()

    async def probe(self, *ranks: Engine) -> None:
        """Probe one engine once and judge it, or a server once and judge all its ranks."""
        began = self._clock()
        good = await self._asker.healthy(ranks[0])
        if good is None:  # silent: alive when it answered anything in the meantime
            good = max(each.answered_at for each in ranks) >= began - self._config.interval_s
        elif good:
            await self._ask_more(ranks)
        for each in ranks:
            self.judge(each, good=good)

    async def _ask_more(self, ranks: Sequence[Engine]) -> None:
        """Ask what it is before it is used, and each time what it has to do."""
        exposition = await self._asker.exposition(ranks[0])
        if any(self._is_due(each) for each in ranks):
            self._describe(ranks, await self._asker.traits(ranks[0], exposition or ""))
        if exposition is None:
            return
        for each in ranks:
            each.load = read_load(exposition, self._clock(), rank=each.address.dp_index)
            self._ranks.judge(each, read_ranks(exposition))

    def _is_due(self, engine: Engine) -> bool:
        if engine.traits is None or engine.health is not EngineHealth.UP:
            return True
        return self._clock() - engine.described_at >= _DESCRIBE_S

    def _describe(self, ranks: Sequence[Engine], traits: Traits) -> None:
        now, changed = self._clock(), False
        for each in ranks:
            changed = changed or (each.traits != traits and not each.gone)
            each.traits, each.described_at = traits, now
        if changed:
            self._fleet.regroup()

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
