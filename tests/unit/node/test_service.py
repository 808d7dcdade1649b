"""Running a program as a service: real programs, a real notification socket, no systemd."""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvduplex.errors import EngineFailedError
from kvduplex.node.notify import Notifier
from kvduplex.node.service import Pace, Service
from kvduplex.supervise.unit import Unit, UnitKind

SERVER = """
import http.server, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        healthy = pathlib.Path(sys.argv[2]).exists()
        self.send_response(200 if healthy else 503); self.end_headers()
        if not healthy:
            with open(sys.argv[2] + ".refused", "a") as file: file.write(".")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_MARK = b"kvduplex-test-mark"
FAST = Pace(start_s=20, probe_s=0.02, drain_s=5, grace_s=5)


class Socket:
    """Stands where systemd listens, and reads at once as systemd does: a queue that is full is waited for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._datagrams.bind(str(path))
        self._seen: list[str] = []
        self._marks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while data := self._datagrams.recv(4096):
            if data == _MARK:
                self._marks.put(data)
            else:
                self._seen += data.decode().splitlines()

    def _send(self, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(data, str(self.path))

    def close(self) -> None:
        self._send(b"")
        self._reader.join(20)
        self._datagrams.close()

    def lines(self) -> list[str]:
        """All that has been told until now."""
        self._send(_MARK)
        self._marks.get(timeout=20)
        return list(self._seen)

    async def saw(self, text: str) -> None:
        async with asyncio.timeout(20):
            while not any(text in line for line in self.lines()):  # noqa: ASYNC110 - datagrams set no event
                await asyncio.sleep(0.01)


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Socket]:
    listener = Socket(tmp_path / "notify")
    yield listener
    listener.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """An HTTP server that is healthy as long as a file exists."""

    def __init__(self, folder: Path, systemd: Socket, pace: Pace = FAST, script: str = SERVER) -> None:
        self.healthy = folder / "healthy"
        self.work: list[str | None] = []
        port = free_port()
        self.unit = Unit(
            name="prefill-0",
            kind=UnitKind.ENGINE,
            argv=(sys.executable, "-c", script, str(port), str(self.healthy)),
            url=f"http://127.0.0.1:{port}",
            log=folder / "program.log",
        )
        self.stop = asyncio.Event()
        self.service = Service(
            self.unit,
            environment={"PATH": "/usr/bin:/bin"},
            notifier=Notifier(str(systemd.path)),
            pace=pace,
            stop=self.stop,
            busy=self.busy,
            clock=time.monotonic,
        )

    async def refused(self, count: int) -> None:
        """Wait until the program has answered `count` probes with 503."""
        async with asyncio.timeout(20):
            while self.refusals() < count:  # noqa: ASYNC110 - another process counts
                await asyncio.sleep(0.01)

    def refusals(self) -> int:
        answered = Path(f"{self.healthy}.refused")
        return answered.stat().st_size if answered.exists() else 0

    async def busy(self) -> str | None:
        return self.work.pop(0) if self.work else None


async def test_readiness_is_told_once_the_program_answers(tmp_path: Path, systemd: Socket) -> None:
    program = Program(tmp_path, systemd)
    running = asyncio.create_task(program.service.run())
    await systemd.saw("EXTEND_TIMEOUT_USEC=")
    assert not any(line == "READY=1" for line in systemd.lines())
    program.healthy.touch()
    await systemd.saw("READY=1")
    program.stop.set()
    await asyncio.wait_for(running, 20)
    assert "STOPPING=1" in systemd.lines()


async def test_the_watchdog_is_fed_only_while_the_program_is_healthy(tmp_path: Path, systemd: Socket) -> None:
    program = Program(tmp_path, systemd)
    program.healthy.touch()
    running = asyncio.create_task(program.service.run())
    await systemd.saw("WATCHDOG=1")
    program.healthy.unlink()
    await program.refused(2)  # whatever was asked while it was healthy has been told by now
    fed = systemd.lines().count("WATCHDOG=1")
    await program.refused(6)
    assert systemd.lines().count("WATCHDOG=1") == fed
    program.stop.set()
    await asyncio.wait_for(running, 20)


async def test_a_program_that_is_not_ready_in_time_is_ended_with_its_log(tmp_path: Path, systemd: Socket) -> None:
    script = "print('loading for ever', flush=True); import time; time.sleep(600)"
    program = Program(tmp_path, systemd, Pace(start_s=1.0, probe_s=0.02, grace_s=5), script)
    with pytest.raises(EngineFailedError, match=r"(?s)prefill-0: not ready after 1 s.*loading for ever"):
        await asyncio.wait_for(program.service.run(), 30)


async def test_a_program_that_dies_is_reported_with_its_cause(tmp_path: Path, systemd: Socket) -> None:
    program = Program(tmp_path, systemd, script="raise ValueError('no such model')")
    with pytest.raises(EngineFailedError, match=r"(?s)prefill-0 ended with exit code 1.*ValueError: no such model"):
        await asyncio.wait_for(program.service.run(), 30)


async def test_turns_in_flight_end_before_the_program_does(tmp_path: Path, systemd: Socket) -> None:
    program = Program(tmp_path, systemd)
    program.healthy.touch()
    program.work = ["2 running", "1 running", None]
    running = asyncio.create_task(program.service.run())
    await systemd.saw("READY=1")
    program.stop.set()
    await asyncio.wait_for(running, 20)
    drained = [line for line in systemd.lines() if "drains: " in line]
    assert drained == ["STATUS=prefill-0 drains: 2 running", "STATUS=prefill-0 drains: 1 running"]


async def test_a_drain_ends_at_its_deadline(tmp_path: Path, systemd: Socket) -> None:
    program = Program(tmp_path, systemd, Pace(start_s=20, probe_s=0.02, drain_s=0.2, grace_s=5))
    program.healthy.touch()
    program.work = ["1 running"] * 1000
    running = asyncio.create_task(program.service.run())
    await systemd.saw("READY=1")
    program.stop.set()
    await asyncio.wait_for(running, 20)
    assert program.work  # it was still busy


def test_without_systemd_nothing_is_told() -> None:
    Notifier.from_environ({}).ready("x")
    Notifier("/nonexistent/socket").alive()


def test_abstract_sockets_are_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0kvduplex-test-notify")
        listener.settimeout(5)
        Notifier("@kvduplex-test-notify").extend(1.5)
        assert listener.recv(100) == b"EXTEND_TIMEOUT_USEC=1500000"


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    """Linux queues about ten datagrams; readiness must not be the one that is lost."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        notifier = Notifier(str(tmp_path / "notify"))

        def tell() -> None:
            for number in range(50):
                notifier.status(str(number))

        writer = threading.Thread(target=tell)
        writer.start()
        seen = [listener.recv(4096).decode() for _ in range(50)]
        writer.join()
    assert seen == [f"STATUS={number}" for number in range(50)]
