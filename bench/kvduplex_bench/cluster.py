"""The cluster under measurement: one started for the run and ended with it, or one that is already there."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvduplex_bench.errors import ClusterError

__all__ = ["Cluster", "free_ports", "started"]

_STOP_WITHIN_S = 15.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where everything listens.

    Attributes:
        url: The router's base URL.
        prefill: Base URLs of the prefill engines.
        decode: Base URLs of the decode engines.
        ready: The readiness line as `kvduplex serve --json` printed it; empty for a cluster that was found.
    """

    url: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    ready: dict[str, Any] = field(default_factory=dict)


def free_ports(count: int) -> list[int]:
    """So many TCP ports that nothing listens on right now; they can be taken by others at any moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def started(arguments: Sequence[str], timeout_s: float = 300.0, *, backend: str = "cpu") -> Iterator[Cluster]:
    """Run ``kvduplex serve`` for `backend` with `arguments` for the length of the block.

    It is a process of its own, so that what is measured is what a user starts.

    Raises:
        ClusterError: It was not ready within `timeout_s`, or ended before; what it printed is in the message.
    """
    command = [sys.executable, "-m", "kvduplex", "serve", backend, "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield _cluster(_ready_line(process, timeout_s))
        finally:
            _stop(process)


def _ready_line(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """The first JSON object on the process's output."""
    assert process.stdout is not None  # noqa: S101 - opened as a pipe above
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            line = process.stdout.readline()
            if not line:
                raise ClusterError(f"the cluster ended with status {process.wait()} before it was ready; see above")
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
    raise ClusterError(f"the cluster was not ready within {timeout_s:.0f} s")


def _cluster(ready: dict[str, Any]) -> Cluster:
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    for engine in ready["engines"]:
        urls[engine["role"]].append(engine["url"])
    return Cluster(ready["url"], tuple(urls["prefill"]), tuple(urls["decode"]), ready)


def _stop(process: subprocess.Popen[str]) -> None:
    """End the supervisor as a person would; it ends everything it started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise ClusterError(f"the cluster (process {process.pid}) did not end within {_STOP_WITHIN_S:.0f} s") from None
