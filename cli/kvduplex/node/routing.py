"""From the node file to the router's own configuration file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvduplex.node.config import NodeConfig
from kvduplex.node.discovery import Engines
from kvduplex.node.document import NodeConfigError
from kvduplex_router.config import RouterConfig, build_config
from kvduplex_router.errors import ConfigError

__all__ = ["ENGINE_KEY_VARIABLE", "STATE_PASSWORD_VARIABLE", "check_router_file", "router_document"]

ENGINE_KEY_VARIABLE = "KVDUPLEX_ENGINE_KEY"
"""Environment variable that carries the engines' key to the router."""
STATE_PASSWORD_VARIABLE = "KVDUPLEX_STATE_PASSWORD"  # noqa: S105 - its name, not its value
"""Environment variable that carries the shared store's password to the router."""


def router_document(config: NodeConfig, engines: Engines, *, keys_file: Path | None) -> str:
    """Text of the router's configuration file.

    Args:
        config: The node file.
        engines: Whom to route to.
        keys_file: Where the clients' keys were written, when there are any.
    """
    router, leases = config.router, config.leases
    conversations = {"decoder_kv_blocks_ttl_s": leases.decoder_kv_blocks_ttl, "lease_ttl_s": leases.lease_ttl_s}
    host = f"[{router.bind_host}]" if ":" in router.bind_host else router.bind_host
    document: dict[str, Any] = {
        "listen": f"{host}:{router.port}",
        **_fleet(engines),
        "on_no_prefill": router.on_no_prefill,
        "conversations": conversations,
        "timeouts": {"shutdown_s": float(max(1, config.drain.timeout_s))},
    }
    if auth := _auth(config, keys_file):
        document["auth"] = auth
    if config.state.url is not None:
        document["state"] = _state(config, config.state.url)
    return yaml.safe_dump(_merged(document, router.options), sort_keys=False)


def _fleet(engines: Engines) -> dict[str, list[str]]:
    # The router takes one kind or the other; a cluster that has both roles uses them.
    if engines.replicas and not (engines.prefill and engines.decode):
        return {"engines": list(engines.replicas)}
    return {"prefill": list(engines.prefill), "decode": list(engines.decode)}


def check_router_file(path: Path) -> RouterConfig:
    """Read the file as the router will.

    Raises:
        NodeConfigError: The router would refuse it.
    """
    try:
        return build_config(path)
    except ConfigError as error:
        raise NodeConfigError(f"router.options or discovery: {error}") from error


def _auth(config: NodeConfig, keys_file: Path | None) -> dict[str, str]:
    auth = {"keys_file": str(keys_file)} if keys_file is not None else {}
    return auth | ({"engine_key_env": ENGINE_KEY_VARIABLE} if config.keys.engines is not None else {})


def _state(config: NodeConfig, url: str) -> dict[str, str]:
    # By cluster, so that clusters with one store do not take each other's conversations.
    state = {"url": url, "namespace": config.cluster}
    return state | ({"password_env": STATE_PASSWORD_VARIABLE} if config.state.password is not None else {})


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged
