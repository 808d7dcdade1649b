"""One engine as the router sees it: its address, its load, and whether it may be used."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvduplex_router.fleet.breaker import Breaker
from kvduplex_router.http.pool import Origin, Pool

__all__ = ["Engine", "EngineHealth", "EngineRole"]


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
    """

    name: str
    role: EngineRole
    origin: Origin
    kv_hosts: tuple[str, ...]
    lease_endpoint: str | None = None
    max_in_flight: int = 0


class Engine:
    """A registered engine and its live state."""

    def __init__(self, address: EngineAddress, *, pool: Pool, breaker: Breaker) -> None:
        self.address = address
        self.name = address.name
        self.role = address.role
        self.pool = pool
        self.breaker = breaker
        self.health = EngineHealth.UNKNOWN
        self.draining = False
        self.in_flight = 0
        self.picked = 0  # number of its last pick, for the picker
        self.answered_at = float("-inf")
        self.identity: str | None = None  # as its transfer parameters last said; another means a restart

    @property
    def usable(self) -> bool:
        """Whether a new request may go there."""
        breaker = self.breaker
        return self.health is not EngineHealth.DOWN and not self.draining and (breaker.closed or breaker.allows)

    @property
    def has_place(self) -> bool:
        """Whether it is below its own limit of requests in flight."""
        limit = self.address.max_in_flight
        return limit == 0 or self.in_flight < limit
