"""Transfer parameters that engines return, checked before they go to another engine.

An engine dials whatever host they name, so that host must be one of the registered engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import is_loopback

__all__ = ["TransferParams", "UnusableParamsError", "checked_params", "merged_params"]

_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::", "*"})
_PORTS: Final = range(1, 65_536)


class UnusableParamsError(Exception):
    """An engine's transfer parameters cannot be passed on."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    """Checked transfer parameters.

    Attributes:
        raw: The JSON object to pass on.
        identity: Who the engine says it is; fresh for each start of it.
    """

    raw: bytes
    identity: str | None


def checked_params(raw: bytes | None, engine: Engine, **changes: object) -> TransferParams:
    """Transfer parameters of `engine` that may be passed on; keys that are not known are kept.

    Loopback and wildcard hosts of an engine on another machine are replaced by its registered address.

    Args:
        raw: The engine's JSON value; None when it sent none.
        engine: Who sent it.
        **changes: Keys to set.

    Raises:
        UnusableParamsError: There are none, or they name a foreign host.
    """
    params = None if raw is None else orjson.loads(raw)
    if raw is None or not isinstance(params, dict) or not params.get("remote_block_ids"):
        raise UnusableParamsError(f"{engine.role.value} engine {engine.name} returned no transfer parameters")
    port = params.get("remote_port")
    if not isinstance(port, int) or isinstance(port, bool) or port not in _PORTS:
        raise UnusableParamsError(f"{engine.role.value} engine {engine.name} returned no usable remote_port")
    host = _checked_host(params.get("remote_host"), engine)
    if host != params.get("remote_host") or changes:
        raw = orjson.dumps({**params, **changes, "remote_host": host})
    identity = params.get("remote_engine_id")
    return TransferParams(raw, identity if isinstance(identity, str) else None)


def merged_params(raw: bytes, more: Mapping[str, object]) -> bytes:
    """A JSON object with further members."""
    return b"%b,%b" % (raw.rstrip()[:-1], orjson.dumps(more)[1:])


def _checked_host(host: object, engine: Engine) -> str:
    own = engine.address.kv_hosts
    if isinstance(host, str):
        if host in own:
            return host
        if host in _WILDCARDS or is_loopback(host):
            return own[0]
    elif host is None:
        return own[0]
    raise UnusableParamsError(
        f"{engine.role.value} engine {engine.name} named a transfer host that is not registered for it; set its side "
        f"channel host to {own[0]}, or list the address under kv_hosts"
    )
