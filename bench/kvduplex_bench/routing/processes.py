"""A simulated engine in a process of its own, so that it can die like one."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import psutil

from kvduplex_bench.errors import BenchError

__all__ = ["SimProcess"]

_START_S: Final = 60.0


class SimProcess:
    """``kvduplex sim`` with one engine.

    Args:
        arguments: Its options.
        port: Its first port.
    """

    def __init__(self, arguments: Sequence[str], port: int) -> None:
        self._command = [sys.executable, "-m", "kvduplex", "sim", "--json", "--port", str(port), *arguments]
        self._process: psutil.Popen | None = None
        self._said: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{port}"

    @property
    def entry(self) -> str:
        """What a router is told of it; known once it has been ready."""
        return str(self._said["entry"])

    def start(self) -> None:
        """Start it; it is ready a moment later."""
        self._process = psutil.Popen(self._command, stdout=subprocess.PIPE, start_new_session=True)

    def wait_until_ready(self) -> None:
        """Wait for it.

        Raises:
            BenchError: It is not ready within a minute.
        """
        assert self._process is not None  # noqa: S101 - started by its owner
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if selector.select(_START_S) and (line := self._process.stdout.readline()):
                (self._said,) = json.loads(line)["engines"]
                return
        raise BenchError(f"the simulated engine at {self.url} was not ready within {_START_S:g} s")

    def stop(self, how: signal.Signals, within_s: float) -> None:
        """Send a signal and wait for its end; kill it when that takes longer than `within_s`."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.send_signal(how)
        try:
            self._process.wait(within_s)
        except psutil.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process = None
