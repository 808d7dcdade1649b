"""The one builder of a vLLM engine's command line and environment, shared by every backend.

Typed options in, an `EnginePlan` out; nothing is read from the machine and nothing is started, so that a dry run
shows exactly what would run. What differs between accelerators arrives as options and as extra environment.

Flags and connector settings are those of vLLM 0.29 to 0.33 (``vllm/entrypoints/launchers/cli_args.py``,
``vllm/distributed/kv_transfer/kv_connector/v1/nixl/``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvduplex_transfer.engine_options import ConnectorKind, EngineOptions
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.interface import EnginePlan, Role

__all__ = ["KV_ROLES", "connector_config", "engine_argv", "engine_environment", "engine_plan", "engine_ports"]

KV_ROLES: Mapping[Role, str] = MappingProxyType({Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"})
"""vLLM's name of each role; ``kv_both`` is deprecated there."""

_SERVER_MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` script looks for a distribution named vllm
_LEASED = ("LeasedNixlConnector", "kvduplex_connector.connector")
_STOCK = ("NixlConnector", None)


def engine_plan(
    options: EngineOptions,
    *,
    name: str,
    environment: Mapping[str, str] | None = None,
    interpreter: str = sys.executable,
) -> EnginePlan:
    """Assemble the plan of one engine.

    Args:
        options: What to run.
        name: Name of the engine in logs, e.g. ``decode-0``.
        environment: What the backend adds; it must not repeat a variable that the options set.
        interpreter: Python that has vLLM installed.

    Raises:
        ConfigError: `environment` contradicts the options.
    """
    return EnginePlan(
        name=name,
        role=options.role,
        argv=engine_argv(options, interpreter),
        environment=_merged(engine_environment(options), environment or {}),
        url=f"http://{_authority(options.advertised_host, options.port)}",
        ports=MappingProxyType(engine_ports(options)),
        lease_endpoint=_lease_endpoint(options),
        kv_blocks_ttl_s=_kv_blocks_ttl_s(options),
    )


def engine_argv(options: EngineOptions, interpreter: str = sys.executable) -> tuple[str, ...]:
    """Command line of the engine, its interpreter first."""
    argv = [interpreter, "-m", _SERVER_MODULE]
    for flag, value in _valued_flags(options):
        if value is not None:
            argv += [flag, str(value)]
    argv += _switches(options)
    for middleware in options.middleware:
        argv += ["--middleware", middleware]
    if options.connector is not ConnectorKind.NONE:
        argv += ["--kv-transfer-config", json.dumps(connector_config(options), separators=(",", ":"))]
    return (*argv, *options.extra_argv)


def engine_environment(options: EngineOptions) -> dict[str, str]:
    """Variables that the options alone decide."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if options.model_is_local:
        environment["HF_HUB_OFFLINE"] = "1"
    if options.connector is not ConnectorKind.NONE:
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = options.side_channel_host
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(options.side_channel_port)
    return environment


def engine_ports(options: EngineOptions) -> dict[str, int]:
    """Every TCP port the engine will listen on, by purpose: ``http``, ``side_channel``, ``lease``."""
    ports = {"http": options.port}
    if options.connector is not ConnectorKind.NONE:
        ports["side_channel"] = options.side_channel_port
    if options.serves_leases and options.lease_port is not None:
        ports["lease"] = options.lease_port
    return ports


def connector_config(options: EngineOptions) -> dict[str, Any]:
    """Value of ``--kv-transfer-config``.

    Raises:
        ValueError: The options name no connector.
    """
    if options.connector is ConnectorKind.NONE:
        raise ValueError("connector is 'none': there is no --kv-transfer-config; check options.connector first")
    default_class, default_module = _LEASED if options.connector is ConnectorKind.LEASED else _STOCK
    module = options.connector_module or default_module
    return {
        "kv_connector": options.connector_class or default_class,
        **({"kv_connector_module_path": module} if module else {}),
        "kv_role": KV_ROLES[options.role],
        "kv_buffer_device": options.kv_buffer_device,
        "kv_load_failure_policy": options.load_failure_policy,
        "kv_connector_extra_config": _extra_config(options),
    }


def _extra_config(options: EngineOptions) -> dict[str, Any]:
    config: dict[str, Any] = {"backends": list(options.nixl_backends)}
    if options.bidirectional:
        config |= {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": options.kv_recompute_threshold,
            "decoder_kv_blocks_ttl": options.decoder_kv_blocks_ttl,
        }
    if options.connector is ConnectorKind.LEASED:
        config |= {"lease_ttl_s": options.lease_ttl_s, "retention_budget": options.retention_budget}
    if options.serves_leases:
        config |= {"lease_host": options.lease_host, "lease_port": options.lease_port}
    return config | dict(options.connector_extra)


def _valued_flags(options: EngineOptions) -> tuple[tuple[str, object], ...]:
    return (
        ("--model", options.model),
        ("--served-model-name", options.served_model_name),
        ("--host", options.host),
        ("--port", options.port),
        ("--tensor-parallel-size", options.tensor_parallel_size),
        ("--dtype", options.dtype),
        ("--seed", options.seed),
        ("--block-size", options.block_size),
        ("--max-model-len", options.max_model_len),
        ("--max-num-seqs", options.max_num_seqs),
        ("--max-num-batched-tokens", options.max_num_batched_tokens),
        ("--gpu-memory-utilization", options.gpu_memory_utilization),
        ("--kv-cache-memory-bytes", options.kv_cache_memory_bytes),
    )


def _switches(options: EngineOptions) -> list[str]:
    # Logged requests would carry prompts, so the switch is spelled out instead of trusting a default.
    # Without the details an engine's usage does not say how much of a prompt was cached.
    switches = ["--no-enable-log-requests", "--enable-prompt-tokens-details"]
    if options.enforce_eager:
        switches.append("--enforce-eager")
    if options.prefix_caching is not None:
        switches.append("--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching")
    return switches


def _lease_endpoint(options: EngineOptions) -> str | None:
    if not options.serves_leases or options.lease_port is None:
        return None
    host = options.lease_host if options.lease_host_is_concrete else options.side_channel_host
    return f"tcp://{_authority(host, options.lease_port)}"


def _kv_blocks_ttl_s(options: EngineOptions) -> int | None:
    keeps = options.role is Role.DECODE and options.bidirectional and options.connector is not ConnectorKind.NONE
    return options.decoder_kv_blocks_ttl if keeps else None


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _merged(decided: Mapping[str, str], added: Mapping[str, str]) -> Mapping[str, str]:
    clash = sorted(key for key in decided.keys() & added.keys() if decided[key] != added[key])
    if clash:
        raise ConfigError(f"environment: {', '.join(clash)} is set by typed options; change those instead")
    return MappingProxyType({**decided, **added})
