"""Which TCP ports of this host are taken, read from the kernel's own table."""

from __future__ import annotations

from collections.abc import Mapping

from kvduplex_transfer.hostchecks.findings import ok, warn
from kvduplex_transfer.interface import Finding, Host

__all__ = ["check_ports", "listening_ports"]

_LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h


def listening_ports(host: Host) -> frozenset[int]:
    """Ports that some process of this network namespace listens on."""
    rows = [line.split() for path in ("/proc/net/tcp", "/proc/net/tcp6") for line in _rows(host, path)]
    return frozenset(int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTEN)  # noqa: PLR2004


def check_ports(host: Host, wanted: Mapping[str, int]) -> Finding:
    """Whether engines could have the ports they usually listen on.

    Args:
        host: Machine to read.
        wanted: Ports by purpose, e.g. ``{"prefill http": 8100}``.
    """
    taken = listening_ports(host)
    busy = [f"{port} ({purpose})" for purpose, port in wanted.items() if port in taken]
    expected = ", ".join(f"{port} ({purpose})" for purpose, port in wanted.items()) + " free"
    if not busy:
        return ok("host.ports", "all free", expected)
    return warn(
        "host.ports",
        "in use: " + ", ".join(busy),
        expected,
        why="engines at the default ports will not start; harmless when these are the running engines",
        fix="`ss -ltnp` names the holders; stop them or choose other ports",
    )


def _rows(host: Host, path: str) -> list[str]:
    return (host.read_text(path) or "").splitlines()[1:]
