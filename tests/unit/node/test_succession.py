"""One service after another without a gap: real programs that share one port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvduplex.errors import EngineFailedError
from kvduplex.node.notify import Notifier
from kvduplex.node.service import Pace, Service
from kvduplex.node.succession import Running, Succession
from kvduplex.supervise.unit import Unit, UnitKind

SERVER = """
import http.server, socket, sys
if sys.argv[2] == "broken": raise ValueError("cannot serve this")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", str(len(sys.argv[2]))); self.end_headers()
        self.wfile.write(sys.argv[2].encode())
    def log_message(self, *_): pass
class Server(http.server.HTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()
server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", flush=True)
server.serve_forever()
"""


class Programs:
    """Starts a program for each design, and hands out designs when told to."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.folder = folder
        self.said: list[str] = []
        self.designs: asyncio.Queue[str | None] = asyncio.Queue()
        self.started: list[Running] = []
        self.is_started = asyncio.Event()

    def start(self, design: str) -> Running:
        unit = Unit(
            name=design,
            kind=UnitKind.ROUTER,
            argv=(sys.executable, "-c", SERVER, str(self.port), design),
            url=f"http://127.0.0.1:{self.port}",
            log=self.folder / f"{design}.log",
        )
        stop = asyncio.Event()
        service = Service(
            unit,
            environment={"PATH": "/usr/bin:/bin"},
            notifier=Notifier(None),
            pace=Pace(start_s=20, probe_s=0.02, drain_s=0, grace_s=5),
            stop=stop,
            busy=self.idle,
            clock=time.monotonic,
            starting=lambda: not unit.log.exists() or "serving" not in unit.log.read_text(),
        )
        self.started.append(Running.start(service, stop))
        self.is_started.set()
        return self.started[-1]

    async def idle(self) -> None:
        return None

    async def next(self, _known: str) -> str | None:
        return await self.designs.get()

    async def ask(self) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.decode().rpartition("\r\n\r\n")[2]

    async def until(self, answer: str) -> None:
        async with asyncio.timeout(20):
            while await self._asked() != answer:  # noqa: ASYNC110 - another process changes its answer
                await asyncio.sleep(0.01)

    async def _asked(self) -> str | None:
        with contextlib.suppress(ConnectionResetError):  # was in the queue of a socket that closed
            return await self.ask()
        return None

    async def first_ready(self) -> None:
        await asyncio.wait_for(self.is_started.wait(), 20)
        await asyncio.wait_for(self.started[0].service.ready.wait(), 20)


@pytest.fixture
async def programs(tmp_path: Path) -> AsyncIterator[Programs]:
    made = Programs(tmp_path)
    yield made
    for running in made.started:
        running.stop.set()
        with contextlib.suppress(EngineFailedError):
            await running.task


def succession(programs: Programs) -> Succession[str]:
    return Succession[str](start=programs.start, changes=programs.next, report=programs.said.append)


async def test_nobody_is_refused_while_one_follows_the_other(programs: Programs) -> None:
    running = asyncio.create_task(succession(programs).run("first"))
    await programs.first_ready()
    await programs.designs.put("second")
    seen = set()
    async with asyncio.timeout(20):
        while not programs.started[0].task.done():
            seen.add(await programs._asked())
    await programs.until("second")
    assert "first" in seen
    await programs.designs.put(None)
    await asyncio.wait_for(running, 20)
    assert all(each.task.done() for each in programs.started)


async def test_a_successor_that_fails_leaves_the_old_one_in_office(programs: Programs) -> None:
    running = asyncio.create_task(succession(programs).run("first"))
    await programs.first_ready()
    await programs.designs.put("broken")
    await programs.designs.put("third")
    await programs.until("third")
    assert any("cannot serve this" in line for line in programs.said)
    await programs.designs.put(None)
    await asyncio.wait_for(running, 20)


async def test_the_one_in_office_failing_ends_the_succession(programs: Programs) -> None:
    with pytest.raises(EngineFailedError, match="cannot serve this"):
        await asyncio.wait_for(succession(programs).run("broken"), 20)
