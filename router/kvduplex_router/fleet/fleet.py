"""All registered engines, built from the configuration, by role."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from kvduplex_router.clock import Clock
from kvduplex_router.config import EngineConfig, RouterConfig
from kvduplex_router.fleet.breaker import Breaker
from kvduplex_router.fleet.engine import Engine, EngineAddress, EngineHealth, EngineRole
from kvduplex_router.fleet.tls import client_context
from kvduplex_router.http.pool import Origin, Pool, Timeouts
from kvduplex_router.http.watchdog import Watchdog

__all__ = ["Fleet", "build_fleet"]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Fleet:
    """The engines of one router."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.prefill = tuple(e for e in self.engines if e.role is EngineRole.PREFILL)
        self.decode = tuple(e for e in self.engines if e.role is EngineRole.DECODE)
        self.replicas = tuple(e for e in self.engines if e.role is EngineRole.REPLICA)
        self._by_name = {engine.name: engine for engine in self.engines}

    @property
    def disaggregated(self) -> bool:
        """Whether turns are split over prefill and decode engines."""
        return bool(self.decode)

    @property
    def whole(self) -> tuple[Engine, ...]:
        """Engines that take requests which are not split."""
        return self.decode if self.disaggregated else self.replicas

    def find(self, name: str) -> Engine | None:
        """The engine of that name."""
        return self._by_name.get(name)

    def missing(self) -> list[str]:
        """Roles without an engine that answered its last probe, each as a sentence; empty when ready."""
        roles = [(EngineRole.PREFILL, self.prefill), (EngineRole.DECODE, self.decode)]
        wanted = roles if self.disaggregated else [(EngineRole.REPLICA, self.replicas)]
        return [
            f"no {role} engine answers /health: " + ", ".join(f"{e.name} is {e.health.value}" for e in engines)
            for role, engines in wanted
            if not any(e.health is EngineHealth.UP for e in engines)
        ]

    def close(self) -> None:
        """Drop all connections."""
        for engine in self.engines:
            engine.pool.close()


def build_fleet(config: RouterConfig, *, watchdog: Watchdog, clock: Clock) -> Fleet:
    """Make the engines that `config` lists; opens no connection."""
    roles = (
        (EngineRole.PREFILL, config.prefill),
        (EngineRole.DECODE, config.decode),
        (EngineRole.REPLICA, config.engines),
    )
    return Fleet([_engine(entry, role, config, watchdog, clock) for role, entries in roles for entry in entries])


def _engine(entry: EngineConfig, role: EngineRole, config: RouterConfig, watchdog: Watchdog, clock: Clock) -> Engine:
    origin = Origin.parse(entry.url)
    limits = config.timeouts
    timeouts = Timeouts(limits.connect_s, limits.first_byte_s, limits.idle_s, limits.keep_alive_s)
    tls = client_context(config.tls) if origin.scheme == "https" else None
    breaker = Breaker(failures=config.breaker.failures, open_s=config.breaker.open_s, clock=clock)
    address = EngineAddress(
        name=entry.name,
        role=role,
        origin=origin,
        kv_hosts=(*entry.kv_hosts, origin.host),
        lease_endpoint=f"tcp://{entry.lease}" if entry.lease else None,
        max_in_flight=entry.max_in_flight,
    )
    return Engine(address, pool=Pool(origin, timeouts=timeouts, watchdog=watchdog, tls=tls), breaker=breaker)


def is_loopback(host: str) -> bool:
    """Whether `host` names the machine it is used on."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
