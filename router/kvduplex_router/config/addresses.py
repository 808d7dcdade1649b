"""Addresses as people write them, checked."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

__all__ = ["check_host", "check_host_port", "check_url", "offset_port", "ports_of", "split_url"]

_NAME: Final = re.compile(r"(?=.{1,255}$)[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")


def check_host(value: str) -> str:
    """Return a host name or an IP address, IPv6 without brackets.

    Raises:
        ValueError: It is neither.
    """
    if _NAME.fullmatch(value):
        return value
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError(f"'{value}' is neither a host name nor an IP address") from None
    return value


def split_url(value: str, form: str) -> SplitResult:
    """Split an ``http`` or ``https`` URL; what may be a password is in no message.

    Args:
        value: The URL.
        form: What it should look like, for the message.

    Raises:
        ValueError: It is something else, names a user or a password, or has a wrong host or port.
    """
    shown = re.sub(r"//[^/]*@", "//...@", value)
    try:
        parts = urlsplit(value)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"'{shown}' is not a URL of the form {form}")
    if "@" in parts.netloc:
        raise ValueError(f"'{shown}' has more than scheme, host and port before its path; use {form}")
    if parts.netloc.endswith(":"):
        raise ValueError(f"'{value}' has no port after the colon")
    check_host(parts.hostname)
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"'{value}' has a port outside 1 to 65535") from None
    if port == 0:
        raise ValueError(f"'{value}' has port 0; a fixed port of 1 to 65535 is needed")
    return parts


def check_url(value: str) -> str:
    """Return an engine URL without a trailing slash.

    Raises:
        ValueError: It is not ``http[s]://HOST[:PORT]``.
    """
    parts = split_url(value, "http://HOST:PORT")
    if parts.path not in ("", "/") or "?" in value or "#" in value:
        raise ValueError(
            f"'{parts.scheme}://{parts.hostname}...' has more than scheme, host and port; use http://HOST:PORT"
        )
    return value.rstrip("/")


def check_host_port(value: str) -> str:
    """Return ``HOST:PORT`` (IPv6 hosts in brackets).

    Raises:
        ValueError: It is something else, or the port is outside 1 to 65535.
    """
    try:
        parts = urlsplit(f"//{value}")
        host, port = check_host(parts.hostname or ""), parts.port
    except ValueError:
        raise _not_host_port(value) from None
    if parts.netloc != value or (":" in host and not value.startswith("[")):
        raise _not_host_port(value)
    if not port:
        raise ValueError(f"'{value}' needs a port of 1 to 65535")
    return value


def ports_of(value: str, *, first: int, count: int) -> tuple[str, range]:
    """Host of a checked ``HOST:PORT``, and `count` ports that begin `first` after it; they may end beyond 65535."""
    host, _, port = value.rpartition(":")
    return host, range(int(port) + first, int(port) + first + count)


def offset_port(value: str, by: int) -> str:
    """A checked ``HOST:PORT`` with a port that is `by` higher."""
    host, ports = ports_of(value, first=by, count=1)
    return f"{host}:{ports[0]}"


def _not_host_port(value: str) -> ValueError:
    return ValueError(f"'{value}' is not HOST:PORT; write IPv6 hosts in brackets, e.g. [::1]:8000")
