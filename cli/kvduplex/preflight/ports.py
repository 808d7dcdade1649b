"""Whether every port of a cluster is free, and who holds those that are not."""

from __future__ import annotations

import errno
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence

import psutil

from kvduplex.supervise import Unit, UnitKind
from kvduplex_transfer.hostchecks.findings import fail
from kvduplex_transfer.interface import Finding

__all__ = ["describe_process", "port_findings"]

_COMMAND_LENGTH = 120


def port_findings(units: Sequence[Unit], *, options: dict[UnitKind, str]) -> list[Finding]:
    """A failure for each port that is taken, or that two units want.

    Args:
        units: What is to be started.
        options: How to choose other ports for a kind of unit, e.g. ``--port 8001``.
    """
    return [*_collisions(units), *(finding for unit in units for finding in _taken(unit, options[unit.kind]))]


def _collisions(units: Sequence[Unit]) -> Iterator[Finding]:
    wanted: dict[int, list[str]] = defaultdict(list)
    for unit in units:
        for purpose, port in unit.ports.items():
            wanted[port].append(f"{unit.name} ({purpose})")
    for port, who in wanted.items():
        if len(who) > 1:
            yield fail(
                "ports.distinct",
                f"port {port} is wanted by {' and '.join(who)}",
                "a port for each",
                why="only one process can listen on it",
                fix="choose ports that lie further apart",
            )


def _taken(unit: Unit, option: str) -> Iterator[Finding]:
    for purpose, port in unit.ports.items():
        problem = _bind_problem(unit.bind_host, port)
        if problem is None:
            continue
        holder = _holder(port) if problem == errno.EADDRINUSE else None
        yield fail(
            "ports.free",
            f"{unit.bind_host}:{port} ({unit.name}, {purpose}) {_reason(problem, holder)}",
            "free",
            why="a server that cannot bind its port ends at once",
            fix=f"end it (kill {holder.pid}), or choose another: {option}" if holder else f"choose another: {option}",
        )


def _bind_problem(host: str, port: int) -> int | None:
    """The error number that binding gives; None when the port is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier run that still linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno or errno.EADDRINUSE
    return None


def _reason(problem: int, holder: psutil.Process | None) -> str:
    if problem == errno.EADDRINUSE:
        return f"is held by {describe_process(holder)}" if holder else "is held by a process of another user"
    reasons = {
        errno.EACCES: "may not be bound by this user (ports below 1024 are reserved)",
        errno.EADDRNOTAVAIL: "is not an address of this machine",
    }
    return reasons.get(problem, f"cannot be bound: {errno.errorcode.get(problem, problem)}")


def _holder(port: int) -> psutil.Process | None:
    """A process with a socket bound to the port; only root sees those of other users."""
    try:
        bound = [each for each in psutil.net_connections(kind="tcp") if each.laddr and each.laddr.port == port]
        bound.sort(key=lambda each: each.status != psutil.CONN_LISTEN)  # who listens is who matters
        pid = next((each.pid for each in bound if each.pid), None)
        return psutil.Process(pid) if pid else None
    except psutil.Error:
        return None


def describe_process(process: psutil.Process) -> str:
    """Process id and command line, shortened; the command line is left out where it cannot be read."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        command = ""
    shown = command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 1]}…"
    return f"process {process.pid} ({shown})" if shown else f"process {process.pid}"
