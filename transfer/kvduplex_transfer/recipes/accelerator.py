"""Settings that every accelerated engine shares, and how they become an engine plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvduplex_transfer.config import parse_options
from kvduplex_transfer.engine import engine_plan
from kvduplex_transfer.engine_options import WILDCARD_HOSTS, ConnectorKind, EngineOptions, HostAddress
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.host.options import HTTP_PORTS, LEASE_PORTS, SIDE_CHANNEL_PORTS
from kvduplex_transfer.interface import EnginePlan, NixlSettings, Role

__all__ = ["AcceleratorOptions", "accelerator_plan"]

# Up to 0.32, stock vLLM tells where a decode engine keeps KV only in answers that are not streamed.
_STREAM_PARAMS = "kvduplex_connector.stream_params.StreamParamsMiddleware"
_LAST_PORT = 65535
_PORTS_PER_ENGINE = ("side_channel", "lease")  # vLLM adds the data parallel index to these
_OWN = frozenset(
    {
        "bind_host",
        "advertised_host",
        "http_port",
        "side_channel_port",
        "lease_port",
        "engines",
        "data_parallel_size",
        "flags",
        "additional_config",
        "environment",
        "download_dir",
        "cache_dir",
        "ready_timeout_s",
    }
)


class AcceleratorOptions(BaseModel):
    """What a role of an accelerated recipe may set, on any accelerator. Times in seconds, lengths in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    served_model_name: str | None = Field(default=None, min_length=1)
    advertised_host: HostAddress | None = None
    """Address at which peers and the router reach this host; `kvduplex serve` fills it in."""
    bind_host: HostAddress | None = None
    """Address the engine's servers listen on; `advertised_host` when not given, so that no other network sees them."""
    http_port: int | None = Field(default=None, ge=1, le=65535)
    side_channel_port: int | None = Field(default=None, ge=1, le=65535)
    lease_port: int | None = Field(default=None, ge=1, le=65535)

    engines: int = Field(default=1, ge=1, le=64)
    """Engines of this role on one host."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)
    dtype: str = "auto"
    block_size: int | None = Field(default=None, ge=1)
    """Tokens per KV block."""
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    prefix_caching: bool | None = None
    enforce_eager: bool = False
    seed: int = Field(default=0, ge=0)

    connector: ConnectorKind = ConnectorKind.STOCK
    connector_class: str | None = Field(default=None, min_length=1)
    bidirectional: bool = True
    kv_recompute_threshold: int = Field(default=64, ge=0)
    decoder_kv_blocks_ttl: int = Field(default=480, ge=1)
    lease_ttl_s: float = Field(default=30.0, gt=0)
    retention_budget: float = Field(default=0.5, gt=0, le=1)
    connector_extra: Mapping[str, Any] = Field(default_factory=dict)

    middleware: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Further vLLM flags, as they are."""
    additional_config: Mapping[str, Any] = Field(default_factory=dict)
    """Value of ``--additional-config``."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Further environment; it wins over the backend's own."""

    download_dir: str | None = None
    """Absolute folder for weights from the hub."""
    cache_dir: str | None = None
    """Absolute folder for compiled graphs (``VLLM_CACHE_ROOT``)."""
    ready_timeout_s: int = Field(default=1800, ge=1)
    """Longest start, compilation included."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """Check `values`, read from `where`.

        Raises:
            ConfigError: A key is unknown or a value is out of range; names the place, the key and the remedy.
        """
        return parse_options(cls, values, where=where)

    @property
    def ranks(self) -> int:
        """Accelerator cores or devices that one engine takes."""
        return self.tensor_parallel_size * self.data_parallel_size

    @model_validator(mode="after")
    def _leases_fit(self) -> Self:
        if self.connector is ConnectorKind.LEASED and self.connector_class is not None:
            raise ValueError(
                f"connector leased is built on vLLM's NixlConnector and cannot run as {self.connector_class}; "
                "use connector: stock, or leave connector_class out where the model does not need it"
            )
        return self

    @field_validator("environment", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        # YAML reads `NAME: 2` as a number.
        if isinstance(value, Mapping):
            return {key: str(item) if isinstance(item, int) else item for key, item in value.items()}
        return value

    @field_validator("download_dir", "cache_dir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not PurePosixPath(value).is_absolute():
            raise ValueError("must be an absolute path; engines run in another folder")
        return value

    def first_index(self, index: int) -> int:
        """Offset of the `index`-th engine's side channel and lease ports: one for every data parallel rank."""
        return index * self.data_parallel_size


def accelerator_plan(
    options: AcceleratorOptions,
    *,
    own: frozenset[str],
    model: str,
    role: Role,
    index: int,
    settings: NixlSettings,
    environment: Mapping[str, str],
    engine_values: Mapping[str, Any] = MappingProxyType({}),
    interpreter: str,
    where: str,
) -> EnginePlan:
    """Plan one engine of an accelerated recipe.

    Args:
        options: Settings of the role.
        own: Names of the backend's own settings, which vLLM does not know.
        model: Folder or hub id.
        role: What the engine does.
        index: Which of the role's engines on this host, from 0.
        settings: How NIXL runs here.
        environment: What the backend adds beyond `settings` and the recipe.
        engine_values: Further `EngineOptions`.
        interpreter: Python of the engines.
        where: Place of the settings, for messages.

    Raises:
        ConfigError: `index` is out of range, or a value does not fit vLLM.
    """
    if not 0 <= index < options.engines:
        raise ConfigError(f"{where}: engine index {index} is outside 0..{options.engines - 1}; raise engines")
    values = options.model_dump(exclude=set(_OWN | own)) | _addresses(options, role, index, where)
    values |= {"role": role, "model": model, "extra_argv": _extra_argv(options)}
    values |= {"middleware": _middleware(options, role)}
    values |= {"nixl_backends": tuple(settings.backends), "kv_buffer_device": settings.kv_buffer_device}
    engine = EngineOptions.parse(values | dict(engine_values), where=where)
    transfers = {} if engine.connector is ConnectorKind.NONE else dict(settings.environment)
    name = f"engine-{index}" if engine.connector is ConnectorKind.NONE else f"{role}-{index}"
    variables = transfers | _common_environment(options) | dict(environment) | dict(options.environment)
    plan = engine_plan(engine, name=name, environment=variables, interpreter=interpreter)
    ranks = options.data_parallel_size
    return replace(plan, ports=_all_ports(plan.ports, ranks, where), ranks=ranks)


def _middleware(options: AcceleratorOptions, role: Role) -> tuple[str, ...]:
    needed = role is Role.DECODE and options.connector is ConnectorKind.STOCK and options.bidirectional
    return (_STREAM_PARAMS, *options.middleware) if needed else options.middleware


def _addresses(options: AcceleratorOptions, role: Role, index: int, where: str) -> dict[str, Any]:
    dialable = options.advertised_host or options.bind_host
    if dialable is None or dialable in WILDCARD_HOSTS:
        raise ConfigError(
            f"{where}: advertised_host is {dialable or 'missing'}, which peers cannot dial; "
            "give this host's private address, e.g. --advertise 10.0.1.10"
        )
    bound = options.bind_host or dialable
    offset = options.first_index(index)
    return {
        "host": bound,
        "port": (options.http_port or HTTP_PORTS[role]) + index,
        "side_channel_host": dialable,
        "side_channel_port": (options.side_channel_port or SIDE_CHANNEL_PORTS[role]) + offset,
        "lease_host": bound,
        "lease_port": (options.lease_port or LEASE_PORTS[role]) + offset,
    }


def _extra_argv(options: AcceleratorOptions) -> tuple[str, ...]:
    argv: list[str] = []
    if options.data_parallel_size > 1:
        argv += ["--data-parallel-size", str(options.data_parallel_size)]
    if options.download_dir is not None:
        argv += ["--download-dir", options.download_dir]
    if options.additional_config:
        argv += ["--additional-config", json.dumps(dict(options.additional_config), separators=(",", ":"))]
    return (*argv, *options.flags)


def _common_environment(options: AcceleratorOptions) -> dict[str, str]:
    environment = {"VLLM_ENGINE_READY_TIMEOUT_S": str(options.ready_timeout_s)}
    if options.cache_dir is not None:
        environment["VLLM_CACHE_ROOT"] = options.cache_dir
    return environment


def _all_ports(ports: Mapping[str, int], ranks: int, where: str) -> Mapping[str, int]:
    every = dict(ports)
    for purpose in _PORTS_PER_ENGINE:
        if purpose in ports:
            if ports[purpose] + ranks - 1 > _LAST_PORT:
                raise ConfigError(
                    f"{where}: {purpose}_port {ports[purpose]} and one more for each of {ranks} data parallel ranks "
                    f"end beyond {_LAST_PORT}; choose a lower one"
                )
            every |= {f"{purpose}_{rank}": ports[purpose] + rank for rank in range(1, ranks)}
    return MappingProxyType(every)
