"""Where an engine of the host backend lives: its cores, its ports, its environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvduplex_transfer.engine_options import WILDCARD_HOSTS, EngineOptions
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.host.options import HTTP_PORTS, LEASE_PORTS, SIDE_CHANNEL_PORTS, HostOptions
from kvduplex_transfer.interface import NixlSettings, Role

__all__ = ["engine_cores", "engine_environment", "engine_options"]

_ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""The engine core computes itself instead of starting a worker process.

On CPU vLLM 0.32 turns the backend's short name ``uni`` into ``mp`` (``platforms/cpu.py``), because it could not bind
OpenMP threads otherwise; the class's full name is taken as it is. One process less an engine saves about 0.6 GiB and a
quarter of the start, and there is no queue between two processes that poll: on busy cores those polls, which yield the
core each time, turned answers of 0.2 s into half a minute.
"""


def engine_options(
    options: HostOptions, *, model: str, role: Role, index: int, settings: NixlSettings, where: str
) -> EngineOptions:
    """Options of the `index`-th engine of `role`.

    Raises:
        ConfigError: `index` lies outside the configured number of engines, or a value does not fit vLLM.
    """
    engines = options.engines(role)
    if not 0 <= index < engines:
        raise ConfigError(
            f"{where}: engine index {index} of {role} is outside 0..{engines - 1}; raise {role}_engines, now {engines}"
        )
    return EngineOptions.parse(_values(options, model=model, role=role, index=index, settings=settings), where=where)


def engine_cores(options: HostOptions, *, role: Role, index: int, available: Sequence[int]) -> tuple[int, ...]:
    """Cores of one engine: consecutive ones, prefill engines first, wrapping around when there are too few.

    Raises:
        ConfigError: One engine asks for more cores than there are.
    """
    count = options.cores_per_engine
    if count > len(available):
        raise ConfigError(f"cores_per_engine is {count}, but this process may use {len(available)} cores; lower it")
    first = (index if role is Role.PREFILL else options.prefill_engines + index) * count
    return tuple(available[(first + offset) % len(available)] for offset in range(count))


def engine_environment(options: HostOptions, *, cores: Sequence[int], settings: NixlSettings) -> Mapping[str, str]:
    """What makes a CPU engine stay on its cores and speak UCX.

    Without it OpenMP teams of two engines spin against each other: a decode of 0.5 s was seen to take 73 s. vLLM binds
    only workers that it starts itself; here the engine core is the worker, so OpenMP is told directly.
    """
    return {
        "OMP_NUM_THREADS": str(len(cores)),
        "GOMP_CPU_AFFINITY": " ".join(str(core) for core in sorted(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "KMP_BLOCKTIME": "0",
        **settings.environment,
        "UCX_NET_DEVICES": options.ucx_devices,
        **options.environment,
    }


def _values(options: HostOptions, *, model: str, role: Role, index: int, settings: NixlSettings) -> dict[str, Any]:
    own = {"bind_host", "advertised_host", "http_port", "side_channel_port", "lease_port", "prefill_engines"}
    own |= {"decode_engines", "cores_per_engine", "kv_space_gib", "environment", "network_devices"}
    return options.model_dump(exclude=own) | {
        "role": role,
        "model": model,
        "host": options.bind_host,
        "port": (options.http_port or HTTP_PORTS[role]) + index,
        "side_channel_host": _dialable(options),
        "side_channel_port": (options.side_channel_port or SIDE_CHANNEL_PORTS[role]) + index,
        "lease_host": options.bind_host,
        "lease_port": (options.lease_port or LEASE_PORTS[role]) + index,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "nixl_backends": tuple(settings.backends),
        "kv_buffer_device": settings.kv_buffer_device,
        "extra_argv": (*_ONE_PROCESS, *options.extra_argv),
    }


def _dialable(options: HostOptions) -> str:
    if options.advertised_host is None and options.bind_host in WILDCARD_HOSTS:
        raise ConfigError(
            f"bind_host {options.bind_host!r} is a wildcard, which peers cannot dial; set advertised_host as well"
        )
    return options.advertised_host or options.bind_host
