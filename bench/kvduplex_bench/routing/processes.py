"""What is measured, in processes of their own, so that they can be restarted and die like real ones."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from kvduplex_bench.cluster import free_ports
from kvduplex_bench.errors import BenchError

__all__ = ["Child", "RouterProcess", "SimProcess", "state_server"]

_START_S: Final = 60.0
_STOP_S: Final = 10.0
_POLL_S: Final = 0.05


class Child:
    """A program that is started, told to end, and started again.

    Args:
        command: How it is started.
        environment: Variables it needs besides.
        log: What it says is added there; None keeps its standard output for a reader.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment or {})
        self._log = log
        self._process: psutil.Popen | None = None

    def start(self) -> None:
        """Start it; it is ready a moment later."""
        surroundings = {**os.environ, **self._environment}
        if self._log is None:
            self._process = psutil.Popen(
                self._command, stdout=subprocess.PIPE, start_new_session=True, env=surroundings
            )
            return
        with self._log.open("ab") as log:
            self._process = psutil.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=surroundings
            )

    def stop(self, how: signal.Signals, within_s: float) -> int:
        """Send a signal and wait for its end; kill it when that takes longer than `within_s`.

        One thread may kill it while another still waits for it to end by itself.

        Returns:
            Its exit status, or the negative number of the signal that ended it; 0 when it was not running.
        """
        process = self._process
        if process is None:
            return 0
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(how)
        try:
            status = process.wait(within_s)
        except psutil.TimeoutExpired:
            process.kill()
            status = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
        return int(status or 0)

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def not_ready(self, what: str) -> BenchError:
        """The error to raise when it does not come up; it ends with what was said last."""
        said = [] if self._log is None else self._log.read_text(errors="replace").strip().splitlines()[-3:]
        return BenchError(": ".join([f"{what} was not ready within {_START_S:g} s", *said]))


class SimProcess(Child):
    """``kvduplex sim`` with one engine.

    Args:
        arguments: Its options.
        port: Its first port.
    """

    def __init__(self, arguments: Sequence[str], port: int) -> None:
        super().__init__([sys.executable, "-m", "kvduplex", "sim", "--json", "--port", str(port), *arguments])
        self._said: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{port}"

    @property
    def entry(self) -> str:
        """What a router is told of it; known once it has been ready."""
        return str(self._said["entry"])

    def wait_until_ready(self) -> None:
        """Wait for it.

        Raises:
            BenchError: It is not ready within a minute.
        """
        assert self._process is not None  # noqa: S101 - started by its owner
        output = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if selector.select(_START_S) and (line := output.readline()):
                (self._said,) = json.loads(line)["engines"]
                return
        raise self.not_ready(f"the simulated engine at {self.url}")


class RouterProcess(Child):
    """A router that comes back at the same port.

    Args:
        command: How it is started.
        port: Where it listens.
        environment: Variables it needs besides.
        log: What it says is added there.
    """

    def __init__(self, command: Sequence[str], port: int, *, environment: Mapping[str, str], log: Path) -> None:
        super().__init__(command, environment=environment, log=log)
        self.port = port

    def wait_until_ready(self) -> None:
        """Wait until its ``/ready`` says that engines answer it, as a load balancer's health check does.

        Raises:
            BenchError: It does not within a minute, or it ended.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.running:
            with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/ready", timeout=2
            ):  # fmt: skip
                return
            time.sleep(_POLL_S)
        raise self.not_ready(f"the router at port {self.port}")


@contextlib.contextmanager
def state_server(folder: Path) -> Iterator[str]:
    """A Valkey or Redis server that keeps nothing on disk, for the length of the block; gives its URL for ``--state``.

    Raises:
        BenchError: There is none on the PATH, or it does not answer.
    """
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise BenchError(
            "no valkey-server and no redis-server on the PATH; install one (Debian: apt-get install redis-server)"
        )
    (port,) = free_ports(1)
    keeping = ["--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = Child([program, "--port", str(port), "--bind", "127.0.0.1", *keeping], log=folder / "state.log")
    server.start()
    try:
        _wait_for_pong(port, server)
        yield f"valkey://127.0.0.1:{port}/0"
    finally:
        server.stop(signal.SIGTERM, _STOP_S)


def _wait_for_pong(port: int, server: Child) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.running:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as talk:
            talk.sendall(b"PING\r\n")
            if talk.recv(16).startswith(b"+PONG"):
                return
        time.sleep(_POLL_S)
    raise server.not_ready(f"the state server at port {port}")
