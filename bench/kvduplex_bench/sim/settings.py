"""What a simulated engine is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvduplex_bench.sim.core.timing import Timing

__all__ = ["Connector", "EngineAddress", "EngineSettings", "Role"]


class Role(StrEnum):
    """What the engine is for."""

    REPLICA = "replica"
    PREFILL = "prefill"
    DECODE = "decode"


class Connector(StrEnum):
    """How KV comes back from decode engines."""

    LEASED = "leased"
    STOCK = "stock"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens.

    Attributes:
        host: Address of all its ports.
        port: HTTP; datagrams of other engines too.
        events: KV events.
        replay: Past KV events.
        lease: Lease endpoint.
    """

    host: str
    port: int
    events: int
    replay: int
    lease: int

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.host}:{self.port}"

    def entry(self, role: Role) -> str:
        """What a router is told of it."""
        parts = [f"lease={self.host}:{self.lease}"] if role is Role.DECODE else []
        parts += [f"kv_events={self.host}:{self.events}", f"kv_replay={self.host}:{self.replay}"]
        return f"{self.url}#{'&'.join(parts)}"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine.

    Attributes:
        role: What it is for.
        address: Where it listens.
        timing: How long things take.
        tokenizer: Folder with the served model's tokenizer.
        time_scale: Seconds that pass for one second of the profile.
        connector: How KV comes back.
        caching: Whether its prefix cache is on.
        threshold: Fewest tokens a prefill engine reads from a decode engine.
        blocks_ttl_s: Longest life of a lease, and the life of blocks kept by the stock connector.
        budget: Share of the blocks that leases may pin.
        stream_interval: Tokens in one part of a stream.
        seed: Of failures.
    """

    role: Role
    address: EngineAddress
    timing: Timing
    tokenizer: Path = field(default_factory=Path)
    time_scale: float = 1.0
    connector: Connector = Connector.LEASED
    caching: bool = True
    threshold: int = 64
    blocks_ttl_s: float = 480.0
    budget: float = 0.5
    stream_interval: int = 1
    seed: int = 0
