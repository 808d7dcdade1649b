"""Addresses as people write them, checked."""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["check_host_port", "check_url"]


def check_url(value: str) -> str:
    """Return an engine URL without a trailing slash.

    Raises:
        ValueError: It is not ``http[s]://HOST[:PORT]``.
    """
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"'{value}' is not a URL of the form http://HOST:PORT")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ValueError(
            f"'{parts.scheme}://{parts.hostname}...' has more than scheme, host and port; use http://HOST:PORT"
        )
    if parts.netloc.endswith(":"):
        raise ValueError(f"'{value}' has no port after the colon")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"'{value}' has a port outside 1 to 65535") from None
    if port == 0:
        raise ValueError(f"'{value}' has port 0; engines need a fixed port of 1 to 65535")
    return value.rstrip("/")


def check_host_port(value: str) -> str:
    """Return ``HOST:PORT`` (IPv6 hosts in brackets).

    Raises:
        ValueError: It is something else, or the port is outside 1 to 65535.
    """
    parts = urlsplit(f"//{value}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.netloc != value or "@" in value or (":" in host and not value.startswith("[")):
        raise ValueError(f"'{value}' is not HOST:PORT; write IPv6 hosts in brackets, e.g. [::1]:8000")
    if not port:
        raise ValueError(f"'{value}' needs a port of 1 to 65535")
    return value
