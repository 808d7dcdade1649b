"""Small real programs for the supervisor to run, and a look at what is left of them."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvduplex.supervise import Unit, UnitKind

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
print("loading weights", flush=True)
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
"""
"""A program that answers; scripts go on from here, with ``server`` bound and ``sys.argv[1]`` its port."""


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives ports that nothing listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for Unix sockets below it, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def make_unit(tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Unit]:
    """Makes units that run a Python script; its first argument is the port of the unit's URL."""

    def make(script: str, name: str = "decode-0", **other: object) -> Unit:
        port = free_port()
        values: dict[str, object] = {
            "name": name,
            "kind": UnitKind.ENGINE,
            "argv": (sys.executable, "-I", "-S", "-c", script, str(port)),
            "url": f"http://127.0.0.1:{port}",
            "log": tmp_path / "logs" / f"{name}.log",
            "ports": {"http": port},
            **other,
        }
        return Unit(**values)  # type: ignore[arg-type]

    return make


class Marked:
    """Live processes that inherited this test's mark in their environment."""

    def __init__(self) -> None:
        self.mark = f"kvduplex-test-{time.monotonic_ns()}"

    def __call__(self) -> list[int]:
        return [process.pid for process in psutil.process_iter() if _bears(process, self.mark)]


@pytest.fixture
def marked() -> Iterator[Marked]:
    """Gives a mark for environments, and fails if a process that bears it is left."""
    marked = Marked()
    yield marked
    left = marked()
    for pid in left:
        psutil.Process(pid).kill()
    assert left == []


def _bears(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("KVDUPLEX_TEST") == mark
    except psutil.Error:
        return False


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Polls a condition until it holds or ten seconds have passed."""

    def wait(condition: Callable[[], object], what: str = "condition") -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true"
            time.sleep(0.01)

    return wait
