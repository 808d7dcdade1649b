"""One engine as the router sees it: its address, its load, and whether it may be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvduplex_router.fleet.breaker import Breaker
from kvduplex_router.fleet.traits import Load, Traits
from kvduplex_router.http.pool import Origin, Pool

__all__ = ["Engine", "EngineAddress", "EngineHealth", "EngineRole"]


class EngineRole(StrEnum):
    """What an engine is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    REPLICA = "replica"


class EngineHealth(StrEnum):
    """What the probes say; an engine not yet probed is used when it is needed."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Everything about an engine that configuration fixes.

    Attributes:
        kv_hosts: Hosts it may name in transfer parameters; the first replaces loopback and wildcard addresses.
        lease_endpoint: ``tcp://HOST:PORT`` of its lease protocol, when it speaks it.
        max_in_flight: Requests at a time; 0 is no limit.
        kv_events: ``HOST:PORT`` of its KV events, when it publishes them.
        kv_replay: ``HOST:PORT`` of their replays, when it has them.
        dp_rank: Which data-parallel rank of the server at `origin` it is; None when the server is one engine.
        dp_start: Ranks of the deployment before the server's first.
    """

    name: str
    role: EngineRole
    origin: Origin
    kv_hosts: tuple[str, ...]
    lease_endpoint: str | None = None
    max_in_flight: int = 0
    kv_events: str | None = None
    kv_replay: str | None = None
    dp_rank: int | None = None
    dp_start: int = 0

    @property
    def dp_index(self) -> int | None:
        """Its rank in the whole deployment, by which its metrics and events name it."""
        return None if self.dp_rank is None else self.dp_start + self.dp_rank


class Engine:
    """A registered engine and its live state.

    Attributes:
        picked: Number of its last pick, for the picker.
        answered_at: Monotonic seconds of its last answer.
        identity: As its transfer parameters last said; another means a restart.
        source: Who listed it.
        traits: What it says it is; None while it has not been asked.
        described_at: Monotonic seconds of when it was asked.
        load: What it last said of its load.
        gone: It left the fleet.
    """

    def __init__(self, address: EngineAddress, *, pool: Pool, breaker: Breaker, source: str = "config") -> None:
        self.address = address
        self.name = address.name
        self.role = address.role
        self.source = source
        self.pool = pool
        self.breaker = breaker
        self.health = EngineHealth.UNKNOWN
        self.in_flight = 0
        self.picked = 0
        self.answered_at = float("-inf")
        self.identity: str | None = None
        self.traits: Traits | None = None
        self.described_at = float("-inf")
        self.load: Load | None = None
        self.gone = False
        self._shut: dict[str, str] = {}

    @property
    def usable(self) -> bool:
        """Whether a new request may go there."""
        breaker = self.breaker
        return self.health is not EngineHealth.DOWN and not self._shut and (breaker.closed or breaker.allows)

    @property
    def has_place(self) -> bool:
        """Whether it is below its own limit of requests in flight."""
        limit = self.address.max_in_flight
        return limit == 0 or self.in_flight < limit

    @property
    def draining(self) -> bool:
        """Whether an operator keeps new requests from it."""
        return "draining" in self._shut

    @draining.setter
    def draining(self, value: bool) -> None:
        self.shut("draining", "drained by an operator" if value else None)

    @property
    def shut_because(self) -> Mapping[str, str]:
        """Why it is sent nothing new although it may answer, by kind.

        Kinds are ``draining``, ``leaving``, ``incompatible``, ``no_rank`` and ``gone``.
        """
        return self._shut

    def shut(self, kind: str, reason: str | None) -> None:
        """Keep new requests from it for `reason`; None lets them in again, as far as this kind is concerned."""
        if reason is None:
            self._shut.pop(kind, None)
        else:
            self._shut[kind] = reason
