"""Transfer parameters that engines return, checked before they go to another engine.

An engine dials whatever host they name, so that host must be one of the registered engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import is_loopback

__all__ = ["TransferParams", "UnusableParamsError", "checked_params", "merged_params"]

_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::", "*"})
_PORTS: Final = range(1, 65_536)


class _Named(msgspec.Struct):
    """The members that are looked at."""

    remote_block_ids: msgspec.Raw = msgspec.Raw(b"null")
    remote_port: Any = None
    remote_host: Any = None
    remote_engine_id: Any = None


_NAMED: Final = msgspec.json.Decoder(_Named)
_NO_BLOCKS: Final = (b"null", b"[]", b"{}", b'""', b"false", b"0")


class UnusableParamsError(Exception):
    """An engine's transfer parameters cannot be passed on."""


class TransferParams(msgspec.Struct, frozen=True):
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
    try:
        named = None if raw is None else _NAMED.decode(raw)
    except msgspec.DecodeError:
        named = None
    if raw is None or named is None or bytes(named.remote_block_ids) in _NO_BLOCKS:
        raise UnusableParamsError(f"{engine.role.value} engine {engine.name} returned no transfer parameters")
    port, identity = named.remote_port, named.remote_engine_id
    if not isinstance(port, int) or isinstance(port, bool) or port not in _PORTS:
        raise UnusableParamsError(f"{engine.role.value} engine {engine.name} returned no usable remote_port")
    host = _checked_host(named.remote_host, engine)
    if host != named.remote_host or changes:
        raw = orjson.dumps({**orjson.loads(raw), **changes, "remote_host": host})
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
