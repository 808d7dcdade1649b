"""Transfer parameters that engines return, checked before they go to another engine.

An engine dials whatever host they name, so that host must be one of the registered engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import is_loopback

__all__ = ["UnusableParamsError", "checked_params"]

_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::", "*"})
_PORTS: Final = range(1, 65_536)


class UnusableParamsError(Exception):
    """An engine's transfer parameters cannot be passed on."""


def checked_params(params: object, engine: Engine) -> dict[str, Any]:
    """A copy of `params` whose host is a registered address of `engine`; unknown keys are kept.

    Loopback and wildcard hosts of an engine on another machine are replaced by its registered address.

    Raises:
        UnusableParamsError: There are none, or they name a foreign host.
    """
    if not isinstance(params, Mapping) or not params.get("remote_block_ids"):
        raise UnusableParamsError(f"{engine.role.value} engine {engine.name} returned no transfer parameters")
    port = params.get("remote_port")
    if not isinstance(port, int) or isinstance(port, bool) or port not in _PORTS:
        raise UnusableParamsError(f"{engine.role.value} engine {engine.name} returned no usable remote_port")
    return {**params, "remote_host": _checked_host(params.get("remote_host"), engine)}


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
