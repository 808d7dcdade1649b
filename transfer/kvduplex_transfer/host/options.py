"""Settings of a role on the host backend, as a recipe gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvduplex_transfer.config import parse_options
from kvduplex_transfer.engine_options import ConnectorKind, HostAddress
from kvduplex_transfer.interface import Role

__all__ = ["HTTP_PORTS", "LEASE_PORTS", "SIDE_CHANNEL_PORTS", "HostOptions", "usual_ports"]

HTTP_PORTS = {Role.PREFILL: 8100, Role.DECODE: 8200}
"""First HTTP port of each role; the engine's index is added."""
SIDE_CHANNEL_PORTS = {Role.PREFILL: 5600, Role.DECODE: 5700}
"""First port of each role's NIXL handshake."""
LEASE_PORTS = {Role.PREFILL: 5800, Role.DECODE: 5900}
"""First port of each role's lease server."""

_GIB = 1 << 30


class HostOptions(BaseModel):
    """What `HostBackend.engine_plan` reads from ``recipe.options(role)``.

    Every key has a default, so that an empty mapping is a working development engine. Ports left out are the
    role's usual ones; an engine's index is added to each, so `index` 0 to 99 of both roles never meet.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    served_model_name: str | None = Field(default=None, min_length=1)
    bind_host: HostAddress = "127.0.0.1"
    """Address of all of the engine's servers."""
    advertised_host: HostAddress | None = None
    """Address peers dial; `bind_host` when not given."""
    network_devices: str | None = Field(default=None, min_length=1)
    """Interfaces that carry KV, as UCX names them; ``lo`` when `bind_host` is a loopback address, else ``all``."""
    http_port: int | None = Field(default=None, ge=1, le=65535)
    side_channel_port: int | None = Field(default=None, ge=1, le=65535)
    lease_port: int | None = Field(default=None, ge=1, le=65535)

    prefill_engines: int = Field(default=1, ge=0, le=100)
    """Prefill engines on this machine; with `decode_engines` it decides which cores belong to whom."""
    decode_engines: int = Field(default=1, ge=0, le=100)
    cores_per_engine: int = Field(default=1, ge=1)

    max_model_len: int | None = Field(default=4096, ge=1)
    """Tokens; None leaves it to the model's own limit."""
    block_size: int = Field(default=32, ge=32, multiple_of=32)
    """Tokens per KV block; vLLM's CPU attention takes multiples of 32."""
    dtype: str = "float32"
    """bfloat16 takes an AMX path that some CPUs end with SIGILL."""
    kv_space_gib: float = Field(default=1.0, gt=0, le=1_048_576)
    """KV cache of one engine in GiB."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    enforce_eager: bool = True
    """Off lets torch compile the model, which takes minutes and a C++ compiler."""
    prefix_caching: bool | None = True
    seed: int = Field(default=0, ge=0)

    connector: ConnectorKind = ConnectorKind.STOCK
    bidirectional: bool = True
    kv_recompute_threshold: int = Field(default=64, ge=0, le=1_000_000)
    decoder_kv_blocks_ttl: int = Field(default=480, ge=1, le=86_400)
    lease_ttl_s: float = Field(default=30.0, ge=0.1, le=86_400)
    retention_budget: float = Field(default=0.5, ge=0, le=0.95)
    connector_extra: Mapping[str, Any] = Field(default_factory=dict)
    """Further entries of ``kv_connector_extra_config``."""

    middleware: tuple[str, ...] = ()
    extra_argv: tuple[str, ...] = ()
    """Further vLLM flags."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Further environment; it wins over the backend's own."""

    @field_validator("environment", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        # YAML reads `OMP_NUM_THREADS: 2` as a number.
        if isinstance(value, Mapping):
            return {key: str(item) if isinstance(item, int) else item for key, item in value.items()}
        return value

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """Check `values`, read from `where`.

        Raises:
            ConfigError: A key is unknown or a value is out of range; names the place, the key and the remedy.
        """
        return parse_options(cls, values, where=where)

    @property
    def kv_cache_bytes(self) -> int:
        """`kv_space_gib` in bytes."""
        return round(self.kv_space_gib * _GIB)

    @property
    def ucx_devices(self) -> str:
        """`network_devices` with its default filled in."""
        loopback = self.bind_host.startswith("127.") or self.bind_host in {"::1", "localhost"}
        return self.network_devices or ("lo" if loopback else "all")

    def engines(self, role: Role) -> int:
        """Engines of `role` on this machine."""
        return self.prefill_engines if role is Role.PREFILL else self.decode_engines


def usual_ports() -> dict[str, int]:
    """Ports of the first engine of each role, by purpose."""
    kinds = {"http": HTTP_PORTS, "side channel": SIDE_CHANNEL_PORTS, "leases": LEASE_PORTS}
    return {f"{role} {kind}": port for kind, ports in kinds.items() for role, port in ports.items()}
