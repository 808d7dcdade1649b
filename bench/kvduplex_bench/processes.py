"""Programs under measurement: started, waited for, and ended with everything that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from kvduplex_bench.errors import BenchError

__all__ = ["START_S", "end", "serving", "unwind_on_sigterm"]

START_S: Final = 60.0
_STOP_S: Final = 10.0


def unwind_on_sigterm() -> None:
    """Have SIGTERM end this process by an exception, with status 143, so that what it started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, *, environment: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[psutil.Popen]:
    """A program that answers ``/health`` on `port`, ended with the block; what it says goes to `log`, or nowhere.

    Raises:
        BenchError: It did not serve within `START_S`; the message ends with what it said, where that is known.
    """
    with Path(os.devnull if log is None else log).open("wb") as output:
        process = psutil.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
        try:
            _wait_until_served(process, port, log)
            yield process
        finally:
            end(process)


def end(process: psutil.Popen) -> None:
    """Ask a program to end, and after a while make it and its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=_STOP_S)
        for member in alive:
            member.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _wait_until_served(process: psutil.Popen, port: int, log: Path | None) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(
            f"http://127.0.0.1:{port}/health", timeout=2
        ):  # fmt: skip
            return
        time.sleep(0.05)
    said = [] if log is None else log.read_text(errors="replace").strip().splitlines()[-5:]
    tail = f": {' / '.join(said)}" if log is not None else ""
    raise BenchError(f"{process.args[0]} did not serve port {port} within {START_S:g} s{tail}")
