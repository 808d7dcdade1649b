"""Probes every engine's ``/health`` in turn and says which may be used.

Busy is not dead: an engine that times out on the probe but has answered a request since the last one stays up, and a
probe never touches a stream in flight.
"""

from __future__ import annotations

import asyncio
import logging

from kvduplex_router.clock import Clock
from kvduplex_router.config import HealthConfig
from kvduplex_router.fleet.engine import Engine, EngineHealth
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.http.errors import ExchangeError, StalledError
from kvduplex_router.http.request import get_request

__all__ = ["HealthProber"]

_log = logging.getLogger("kvduplex.router.health")
_OK = 200
_ANSWER_LIMIT = 64 * 1024


class HealthProber:
    """Keeps `Engine.health` current, with hysteresis in both directions."""

    def __init__(self, fleet: Fleet, config: HealthConfig, *, clock: Clock, headers: bytes = b"") -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._headers = headers
        self._streak: dict[str, int] = {}

    async def run(self) -> None:
        """Probe until cancelled, each engine on its own so that a silent one delays no other."""
        async with asyncio.TaskGroup() as group:
            for engine in self._fleet.engines:
                group.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        while True:
            await self.probe(engine)
            await asyncio.sleep(self._config.interval_s)

    async def probe(self, engine: Engine) -> None:
        """Probe one engine once and judge it."""
        began = self._clock()
        good = await self._ask(engine)
        if good is None:  # silent: alive when it answered anything in the meantime
            good = engine.answered_at >= began - self._config.interval_s
        self.judge(engine, good=good)

    def judge(self, engine: Engine, *, good: bool) -> None:
        """Count one probe's result and change the engine's state when the streak is long enough."""
        streak = self._streak.get(engine.name, 0)
        streak = max(streak, 0) + 1 if good else min(streak, 0) - 1
        self._streak[engine.name] = streak
        before = engine.health
        if streak >= self._config.up_after or (good and before is EngineHealth.UNKNOWN):
            engine.health = EngineHealth.UP
        elif -streak >= self._config.down_after or (not good and before is EngineHealth.UNKNOWN):
            engine.health = EngineHealth.DOWN
        if engine.health is not before:
            level = logging.WARNING if engine.health is EngineHealth.DOWN else logging.INFO
            _log.log(level, "%s engine %s is %s", engine.role.value, engine.name, engine.health.value)

    async def _ask(self, engine: Engine) -> bool | None:
        """True or False as the engine answers; None when it is silent."""
        request = get_request(engine.address.origin, "/health", self._headers)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                response = await engine.pool.send(request)
                try:
                    await response.read_all(_ANSWER_LIMIT)
                finally:
                    response.close()
        except (TimeoutError, StalledError):
            return None
        except ExchangeError:
            return False
        return response.status == _OK
