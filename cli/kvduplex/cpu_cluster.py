"""A cluster of CPU engines on this machine: from wishes to plans. Pure, but for looking at the model folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvduplex.announce import Cluster
from kvduplex.errors import UsageError
from kvduplex.preflight.model import is_local, max_tokens
from kvduplex.tinymodel.sizes import ModelSize
from kvduplex.units import engine_unit, router_unit
from kvduplex.vllm_stages import VLLM_STAGES
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.host.options import HTTP_PORTS, LEASE_PORTS, SIDE_CHANNEL_PORTS
from kvduplex_transfer.interface import EnginePlan, Role, TransferBackend
from kvduplex_transfer.strictyaml import parse_yaml

__all__ = ["DEFAULT_CONNECTOR", "CpuCluster", "CpuRecipe", "Where", "parse_settings", "plan_cluster"]

DEFAULT_CONNECTOR = ConnectorKind.LEASED
_DEFAULT_MAX_TOKENS = 8192
_STREAM_PARAMS = "kvduplex_connector.stream_params.StreamParamsMiddleware"
_KV_GIB = 1.0
_TINY_KV_GIB = 0.25  # over 100,000 tokens of the generated model; more only costs time at start

Settings = Mapping[Role, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CpuRecipe:
    """What the host backend reads.

    Attributes:
        model: Folder or hub id.
        settings: Host options of each role.
        name: As in messages.
    """

    model: str
    settings: Settings
    name: str = "serve cpu"

    def options(self, role: Role) -> Mapping[str, Any]:
        """Settings of that role."""
        return self.settings[role]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCluster:
    """A user's wishes.

    Attributes:
        model: Folder or hub id; None for the generated model.
        generated: The generated model's size and folder.
        served_model_name: Name that requests give; None for the folder's name or the hub id.
        prefill: Prefill engines.
        decode: Decode engines.
        connector: Which KV connector engines load.
        prefill_prefix_cache: Whether prefill engines keep a prefix cache.
        max_model_len: Longest context in tokens; None for the model's own, at most 8,192.
        kv_space_gib: KV cache of each engine; None for 1 GiB, or 0.25 GiB with the generated model.
        dtype: Type of weights and KV.
        cores_per_engine: Cores each engine computes on.
        port_offset: Added to every engine port.
        settings: Further host options of each role.
    """

    model: str | None
    generated: tuple[ModelSize, Path]
    served_model_name: str | None = None
    prefill: int = 1
    decode: int = 1
    connector: ConnectorKind = DEFAULT_CONNECTOR
    prefill_prefix_cache: bool = True
    max_model_len: int | None = None
    kv_space_gib: float | None = None
    dtype: str = "float32"
    cores_per_engine: int = 1
    port_offset: int = 0
    settings: Settings = field(default_factory=dict)

    @property
    def engine_model(self) -> str:
        """What engines are told: an absolute folder or a hub id."""
        if self.model is None:
            return str(self.generated[1])
        return str(Path(self.model).expanduser().resolve()) if is_local(self.model) else self.model

    @property
    def public_name(self) -> str:
        """What requests give as ``model``."""
        if self.served_model_name:
            return self.served_model_name
        if self.model is None:
            return self.generated[0].name
        return Path(self.engine_model).name if is_local(self.model) else self.model

    @property
    def kv_gib(self) -> float:
        """KV cache of each engine in GiB."""
        return self.kv_space_gib or (_TINY_KV_GIB if self.model is None else _KV_GIB)

    def recipe(self) -> CpuRecipe:
        """These wishes as host options."""
        return CpuRecipe(self.engine_model, {role: self._options(role) for role in Role})

    def _options(self, role: Role) -> dict[str, Any]:
        return {
            "served_model_name": self.public_name,
            "prefill_engines": self.prefill,
            "decode_engines": self.decode,
            "cores_per_engine": self.cores_per_engine,
            "http_port": HTTP_PORTS[role] + self.port_offset,
            "side_channel_port": SIDE_CHANNEL_PORTS[role] + self.port_offset,
            "lease_port": LEASE_PORTS[role] + self.port_offset,
            "max_model_len": self._max_model_len(),
            "kv_space_gib": self.kv_gib,
            "dtype": self.dtype,
            "connector": self.connector,
            "prefix_caching": self.prefill_prefix_cache if role is Role.PREFILL else True,
            "middleware": self._middleware(role),
            **self.settings.get(role, {}),
        }

    def _max_model_len(self) -> int:
        if self.max_model_len is not None:
            return self.max_model_len
        own = max_tokens(Path(self.engine_model)) if self.model is not None and is_local(self.model) else None
        return min(_DEFAULT_MAX_TOKENS, own or _DEFAULT_MAX_TOKENS)

    def _middleware(self, role: Role) -> tuple[str, ...]:
        # A leased router names the lease itself and need not learn parameters from streams.
        return (_STREAM_PARAMS,) if role is Role.DECODE and self.connector is ConnectorKind.STOCK else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Places of a cluster.

    Attributes:
        host: Address of the router.
        port: Port of the router.
        logs: Folder of log files.
        scratch: Folder below which each engine gets one of its own while it runs.
        cache: Folder for what is worth keeping between starts.
    """

    host: str
    port: int
    logs: Path
    scratch: Path
    cache: Path


def plan_cluster(
    wishes: CpuCluster,
    backend: TransferBackend,
    where: Where,
    *,
    router_config: Path | None = None,
    interpreter: str = sys.executable,
) -> Cluster:
    """Decide every command, port and folder.

    Args:
        wishes: What to start.
        backend: Knows how engines are started.
        where: Places.
        router_config: YAML file for the router.
        interpreter: Python that has the router installed.

    Raises:
        UsageError: A setting is unknown or out of range.
    """
    plans = _engine_plans(wishes, backend)
    extra = ("--config", str(router_config.absolute())) if router_config else ()
    return Cluster(
        engines=[
            engine_unit(
                plan,
                logs=where.logs,
                scratch=where.scratch,
                cache=where.cache,
                stages=VLLM_STAGES,
                cores=_cores(plan),
            )
            for plan in plans
        ],
        roles={plan.name: plan.role for plan in plans},
        router=router_unit(
            plans, host=where.host, port=where.port, logs=where.logs, extra_argv=extra, interpreter=interpreter
        ),
        model=wishes.public_name,
        logs=where.logs,
    )


def _cores(plan: EnginePlan) -> list[int]:
    """The cores that a plan binds OpenMP to."""
    return [int(core) for core in plan.environment.get("GOMP_CPU_AFFINITY", "").split()]


def _engine_plans(wishes: CpuCluster, backend: TransferBackend) -> list[EnginePlan]:
    recipe = wishes.recipe()
    counts = {Role.PREFILL: wishes.prefill, Role.DECODE: wishes.decode}
    try:
        return [backend.engine_plan(recipe, role, index) for role, count in counts.items() for index in range(count)]
    except ConfigError as error:
        raise UsageError(str(error)) from error


def parse_settings(texts: Sequence[str]) -> dict[Role, dict[str, Any]]:
    """Read ``KEY=VALUE`` for both roles, ``ROLE.KEY=VALUE`` for one; values are YAML.

    Raises:
        UsageError: A text has another form.
    """
    settings: dict[Role, dict[str, Any]] = {role: {} for role in Role}
    for text in texts:
        key, separator, value = text.partition("=")
        prefix, dot, rest = key.partition(".")
        roles = [role for role in Role if role == prefix] if dot else list(Role)
        if not (separator and key and roles and (rest or not dot)):
            raise UsageError(f"--set {text}: write KEY=VALUE, prefill.KEY=VALUE or decode.KEY=VALUE")
        for role in roles:
            settings[role][rest if dot else key] = _yaml(text, value)
    return settings


def _yaml(text: str, value: str) -> Any:
    try:
        return parse_yaml(value)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {text}: the value is not YAML: {error}") from error
