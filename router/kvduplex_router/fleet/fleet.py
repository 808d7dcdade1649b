"""All registered engines by role, and how they are made."""

from __future__ import annotations

import ipaddress
import math
import ssl
from collections.abc import Callable, Mapping, Sequence

from kvduplex_router.clock import Clock
from kvduplex_router.config import EngineConfig, RouterConfig
from kvduplex_router.fleet.breaker import Breaker
from kvduplex_router.fleet.engine import Engine, EngineAddress, EngineHealth, EngineRole
from kvduplex_router.fleet.pairing import pair, shut_out
from kvduplex_router.fleet.ranks import NO_RANK
from kvduplex_router.fleet.tls import client_context
from kvduplex_router.http.pool import Origin, Pool, Timeouts
from kvduplex_router.http.watchdog import Watchdog

__all__ = ["EngineMaker", "Fleet", "is_loopback"]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
RANK_LINE = b"x-data-parallel-rank: %d\r\n"
"""By which vLLM and SGLang take a request for one of their data-parallel ranks."""


Listener = Callable[[Engine, bool], None]
"""Called with an engine and whether it joined (True) or left (False)."""


class Fleet:
    """The engines of one router; they come and go while it runs.

    Attributes:
        engines: All of them.
        prefill: Those of that role; like the others one list for the fleet's whole life, so that whoever waits over it
            sees who comes.
        decode: Likewise.
        replicas: Likewise.
        disaggregated: Whether turns are split over prefill and decode engines.
        mixed: Whether some prefill engine must not be paired with some decode engine.
    """

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.prefill: list[Engine] = []
        self.decode: list[Engine] = []
        self.replicas: list[Engine] = []
        self.disaggregated = False
        self.mixed = False
        self._by_name: dict[str, Engine] = {}
        self._partners: Mapping[str, list[Engine]] = {}
        self._listeners: list[Listener] = []

    @property
    def whole(self) -> list[Engine]:
        """Engines that take requests which are not split."""
        return self.decode if self.disaggregated else self.replicas

    def find(self, name: str) -> Engine | None:
        """The engine of that name."""
        return self._by_name.get(name)

    def ranks(self, engine: Engine) -> list[Engine]:
        """Engines that the same server runs, itself among them: its data-parallel ranks, which share its fate."""
        if engine.address.dp_rank is None:
            return [engine]
        url = engine.address.origin.url
        return [each for each in self.engines if each.address.origin.url == url]

    def subscribe(self, listener: Listener) -> None:
        """Tell `listener` of every engine there is, and of each that joins or leaves from now on."""
        self._listeners.append(listener)
        for engine in self.engines:
            listener(engine, True)

    def join(self, engine: Engine) -> None:
        """Take an engine in."""
        self.engines.append(engine)
        self._of_role(engine.role).append(engine)
        self._by_name[engine.name] = engine
        self.disaggregated = engine.role is not EngineRole.REPLICA
        self._changed(engine, joined=True)

    def leave(self, name: str) -> Engine | None:
        """Let an engine go: it is sent nothing new, and what it does goes on."""
        engine = self._by_name.pop(name, None)
        if engine is None:
            return None
        engine.gone = True
        engine.shut("gone", "no longer in the fleet")
        self.engines.remove(engine)
        self._of_role(engine.role).remove(engine)
        self._changed(engine, joined=False)
        return engine

    def regroup(self) -> None:
        """Work out anew who may be paired with whom; to be called when an engine's traits have changed."""
        groups = pair(self.prefill, self.decode)
        self.mixed = groups.mixed
        self._partners = groups.partners
        for engine in (*self.prefill, *self.decode):
            shut_out(engine, groups.excluded.get(engine.name))

    def partners(self, decode: Engine) -> Sequence[Engine]:
        """Prefill engines whose KV a decode engine understands."""
        return self._partners.get(decode.name, ()) if self.mixed else self.prefill

    def fits(self, prefill: Engine, decode: Engine) -> bool:
        """Whether KV of one means something to the other."""
        return not self.mixed or prefill in self.partners(decode)

    def paired(self) -> Sequence[Engine]:
        """Decode engines for a split turn: with a usable partner, where partners differ."""
        if not self.mixed:
            return self.decode
        return [each for each in self.decode if any(p.usable for p in self.partners(each))] or self.decode

    @property
    def kv_usages(self) -> dict[str, float]:
        """Part of its KV cache that an engine uses, by engine, of those that say."""
        said = ((engine.name, engine.load.kv_usage) for engine in self.engines if engine.load is not None)
        return {name: usage for name, usage in said if usage is not None}

    def missing(self) -> list[str]:
        """Roles without an engine that answered its last probe, each as a sentence; empty when ready."""
        roles = [(EngineRole.PREFILL, self.prefill), (EngineRole.DECODE, self.decode)]
        wanted = roles if self.disaggregated else [(EngineRole.REPLICA, self.replicas)]
        return [
            f"no {role} engine answers /health: " + (", ".join(map(_state, engines)) or "none is known yet")
            for role, engines in wanted
            if not any(e.health is EngineHealth.UP and _unfit(e) is None for e in engines)
        ]

    def close(self) -> None:
        """Drop all connections."""
        for engine in self.engines:
            engine.pool.close()

    def _of_role(self, role: EngineRole) -> list[Engine]:
        return {EngineRole.PREFILL: self.prefill, EngineRole.DECODE: self.decode}.get(role, self.replicas)

    def _changed(self, engine: Engine, *, joined: bool) -> None:
        self.regroup()
        for listener in self._listeners:
            listener(engine, joined)


def _unfit(engine: Engine) -> str | None:
    """Why an engine that answers could not serve all the same."""
    return engine.shut_because.get("incompatible") or engine.shut_because.get(NO_RANK)


def _state(engine: Engine) -> str:
    return f"{engine.name} is {_unfit(engine) or engine.health.value}"


class EngineMaker:
    """Makes engines out of configuration entries; opens no connection.

    Raises:
        ConfigError: The TLS files do not load.
    """

    def __init__(self, config: RouterConfig, *, watchdog: Watchdog, clock: Clock) -> None:
        limits = config.timeouts
        self._timeouts = Timeouts(limits.connect_s, limits.first_byte_s, limits.idle_s, limits.keep_alive_s)
        self._config = config
        self._watchdog = watchdog
        self._clock = clock
        self._tls: ssl.SSLContext | None = None

    def __call__(self, entry: EngineConfig, role: EngineRole, *, source: str) -> Engine:
        """Make one."""
        config = self._config
        origin = Origin.parse(entry.url, lines=b"" if entry.dp_rank is None else RANK_LINE % entry.dp_rank)
        if origin.scheme == "https" and self._tls is None:
            self._tls = client_context(config.tls)
        tls = self._tls if origin.scheme == "https" else None
        breaker = Breaker(failures=config.breaker.failures, open_s=config.breaker.open_s, clock=self._clock)
        address = EngineAddress(
            name=entry.name,
            role=role,
            origin=origin,
            kv_hosts=(*entry.kv_hosts, origin.host),
            lease_endpoint=f"tcp://{entry.lease}" if entry.lease else None,
            # What one of several processes may send of what the router may.
            max_in_flight=math.ceil(entry.max_in_flight / config.workers),
            kv_events=entry.kv_events,
            kv_replay=entry.kv_replay,
            dp_rank=entry.dp_rank,
            dp_start=entry.dp_start,
        )
        pool = Pool(origin, timeouts=self._timeouts, watchdog=self._watchdog, tls=tls)
        return Engine(address, pool=pool, breaker=breaker, source=source)


def is_loopback(host: str) -> bool:
    """Whether `host` names the machine it is used on."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
