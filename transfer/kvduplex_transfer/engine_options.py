"""Typed options of one vLLM engine: every key known, every value checked before anything starts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from kvduplex_transfer.config import parse_options
from kvduplex_transfer.interface import Role

__all__ = ["WILDCARD_HOSTS", "ConnectorKind", "EngineOptions", "HostAddress"]

WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::", "*"})
"""Addresses one can bind but not dial."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")


def _check_host(value: str) -> str:
    if value in WILDCARD_HOSTS or _HOST_NAME.fullmatch(value):
        return value
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError("is neither a host name nor an IP address; leave out scheme, port and brackets") from None
    return value


HostAddress = Annotated[str, AfterValidator(_check_host)]
"""A host name or an IP address, IPv6 without brackets; or a wildcard, which each use allows or refuses itself."""

_OWNED_EXTRA_KEYS = frozenset(
    {
        "backends",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "kv_recompute_threshold",
        "lease_host",
        "lease_port",
        "lease_ttl_s",
        "retention_budget",
    }
)
_OWNED_FLAGS = frozenset(
    {
        "--block-size",
        "--dtype",
        "--enable-log-requests",
        "--enable-prefix-caching",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "--host",
        "--kv-cache-memory-bytes",
        "--kv-transfer-config",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--middleware",
        "--model",
        "--no-enable-log-requests",
        "--no-enable-prefix-caching",
        "--port",
        "--seed",
        "--served-model-name",
        "--tensor-parallel-size",
    }
)


class ConnectorKind(StrEnum):
    """Which KV connector an engine loads."""

    NONE = "none"
    """None: a plain engine, as a reference or a replica."""
    STOCK = "stock"
    """vLLM's own ``NixlConnector``."""
    LEASED = "leased"
    """kvduplex's connector: claims before every read."""


class EngineOptions(BaseModel):
    """What one engine is to be. Times in seconds, sizes in bytes, lengths in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Role
    model: str = Field(min_length=1)
    """Folder (absolute, or starting with ``.`` or ``~``) or hub id."""
    served_model_name: str | None = Field(default=None, min_length=1)

    host: HostAddress = "127.0.0.1"
    """Address the HTTP server binds."""
    port: int = Field(ge=1, le=65535)
    side_channel_host: HostAddress = "127.0.0.1"
    """Address at which peers reach this engine's NIXL handshake; it is advertised, so it must be dialable."""
    side_channel_port: int = Field(default=5600, ge=1, le=65535)
    lease_host: HostAddress = "127.0.0.1"
    """Address the lease server of a leased decode engine binds."""
    lease_port: int | None = Field(default=None, ge=1, le=65535)

    tensor_parallel_size: int = Field(default=1, ge=1)
    dtype: str = "auto"
    seed: int = Field(default=0, ge=0)
    block_size: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    enforce_eager: bool = False
    prefix_caching: bool | None = None
    """On, off, or vLLM's default."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of device memory the engine may use."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache, when it is to be fixed."""

    connector: ConnectorKind = ConnectorKind.STOCK
    connector_class: str | None = Field(default=None, min_length=1)
    """Class to load instead of the connector's own, e.g. a platform's subclass of ``NixlConnector``."""
    connector_module: str | None = Field(default=None, min_length=1)
    """Module that holds `connector_class`."""
    connector_extra: Mapping[str, Any] = Field(default_factory=dict)
    """Further entries of ``kv_connector_extra_config``."""
    nixl_backends: tuple[str, ...] = Field(default=("UCX",), min_length=1)
    kv_buffer_device: str = "cpu"
    bidirectional: bool = True
    """Whether KV also flows from decode to prefill."""
    kv_recompute_threshold: int = Field(default=64, ge=0, le=1_000_000)
    """Fewest tokens worth pulling instead of recomputing."""
    decoder_kv_blocks_ttl: int = Field(default=480, ge=1, le=86_400)
    """Longest time a decode engine keeps a finished turn's blocks."""
    kv_load_failure_policy: Literal["recompute", "fail"] | None = None
    """What becomes of a request whose KV could not be loaded; default: ``recompute`` when leased, else ``fail``."""
    lease_ttl_s: float = Field(default=30.0, ge=0.1, le=86_400)
    """Life of a renewed lease from its last renewal."""
    retention_budget: float = Field(default=0.5, ge=0, le=0.95)
    """Share of a decode engine's KV blocks that leases may hold."""

    middleware: tuple[str, ...] = ()
    """Import paths of ASGI middleware to load into the server."""
    extra_argv: tuple[str, ...] = ()
    """Further vLLM flags, appended as they are."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """Check `values`, read from `where`.

        Raises:
            ConfigError: A key is unknown or a value is out of range; names the place, the key and the remedy.
        """
        return parse_options(cls, values, where=where)

    @property
    def model_is_local(self) -> bool:
        """Whether `model` is a folder rather than a hub id, judged by its spelling alone."""
        return self.model.startswith(("/", ".", "~"))

    @property
    def serves_leases(self) -> bool:
        """Whether this engine listens for claims: leased, and holding blocks."""
        return self.connector is ConnectorKind.LEASED and self.role is Role.DECODE

    @property
    def lease_host_is_concrete(self) -> bool:
        """Whether peers could dial `lease_host`."""
        return self.lease_host not in WILDCARD_HOSTS

    @property
    def advertised_host(self) -> str:
        """Address at which clients on other hosts reach the HTTP server."""
        return self.side_channel_host if self.host in WILDCARD_HOSTS else self.host

    @property
    def load_failure_policy(self) -> str:
        """`kv_load_failure_policy` with its default filled in."""
        # vLLM 0.32 leaves a request hanging after "recompute" with the stock bidirectional connector: it asks for
        # the same external tokens again and queues no receive (nixl/pull_scheduler.py). "fail" at least answers.
        default = "recompute" if self.connector is ConnectorKind.LEASED else "fail"
        return self.kv_load_failure_policy or default

    @field_validator("side_channel_host")
    @classmethod
    def _dialable(cls, value: str) -> str:
        if value in WILDCARD_HOSTS:
            raise ValueError("is advertised to peers, so it cannot be a wildcard; give an address they can dial")
        return value

    @field_validator("connector_extra")
    @classmethod
    def _not_ours(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        if owned := sorted(_OWNED_EXTRA_KEYS & value.keys()):
            raise ValueError(f"must not hold {', '.join(owned)}; typed options set that")
        return value

    @field_validator("extra_argv")
    @classmethod
    def _no_shadowed_flags(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(argument.split("=", 1)[0] == "--api-key" for argument in value):
            raise ValueError("must not hold --api-key, which every process list shows; set VLLM_API_KEY instead")
        given = {argument.split("=", 1)[0].replace("_", "-") for argument in value if argument.startswith("--")}
        if owned := sorted(_OWNED_FLAGS & given):
            raise ValueError(f"must not hold {', '.join(owned)}; typed options set that")
        return value

    @model_validator(mode="after")
    def _lease_fits(self) -> Self:
        if self.connector is ConnectorKind.LEASED and self.lease_ttl_s > self.decoder_kv_blocks_ttl:
            raise ValueError(
                f"lease_ttl_s is {self.lease_ttl_s:g}, longer than decoder_kv_blocks_ttl {self.decoder_kv_blocks_ttl}: "
                f"no lease outlives that; lower it"
            )
        return self

    @model_validator(mode="after")
    def _ports_fit(self) -> Self:
        if self.serves_leases and self.lease_port is None:
            raise ValueError("lease_port is needed by a leased decode engine; give a free port, e.g. 5800")
        used = [self.port]
        if self.connector is not ConnectorKind.NONE:
            used.append(self.side_channel_port)
        if self.serves_leases and self.lease_port is not None:
            used.append(self.lease_port)
        if len(set(used)) < len(used):
            raise ValueError(f"port, side_channel_port and lease_port must differ, got {used}")
        return self
