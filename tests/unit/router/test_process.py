"""The router as a process, and as several: started, asked, killed and stopped for real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

KEY = {"authorization": "Bearer admin-secret"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A running ``python -m kvduplex_router``."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, tools: Any) -> None:
        self.process = process
        self.port = port
        self.client = tools.Client(port)
        self.tools = tools

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if _is_worker(child)]

    async def stop(self, number: int = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        async with asyncio.timeout(15):
            return await self.process.wait()


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.is_running() and "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:  # it just ended
        return False


async def spawn(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "ADMIN_KEY": "admin-secret"}
    command = (sys.executable, "-m", "kvduplex_router", *arguments)
    return await asyncio.create_subprocess_exec(*command, stderr=pipe, env=environment)


@pytest.fixture
async def start(tools: Any) -> AsyncIterator[Any]:
    running: list[Any] = []

    async def make(*arguments: str) -> Process:
        engines = [tools.Engine(role) for role in ("prefill", "decode")]
        for engine in engines:
            await engine.start()
        port = free_port()
        addresses = ["--prefill", engines[0].url, "--decode", engines[1].url, "--listen", f"127.0.0.1:{port}"]
        process = Process(await spawn(*addresses, *arguments), port, tools)
        running.extend([process, *engines])
        process.prefill, process.decode = engines  # type: ignore[attr-defined]
        await ready(process)
        return process

    yield make
    for each in running:
        await each.stop()


async def ready(process: Process) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + 30
    while True:
        assert loop.time() < end and process.process.returncode is None, "the router did not start"  # noqa: PT018
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if (await process.client("/ready")).status == 200:
                return
        await asyncio.sleep(0.05)


async def test_one_process_serves_refuses_a_taken_address_and_ends_with_0(start: Any) -> None:
    router = await start()
    assert (await router.client.chat(stream=True)).text == "Hello there"
    arguments = ["--prefill", "http://p:1", "--decode", "http://d:1", "--listen", f"127.0.0.1:{router.port}"]
    for workers in ("1", "2"):
        second = await spawn(*arguments, "--workers", workers)
        async with asyncio.timeout(30):
            _, stderr = await second.communicate()
        assert second.returncode == 2
        assert b"Address already in use" in stderr
        assert b"Traceback" not in stderr
    assert await router.stop() == 0


async def test_workers_share_what_one_process_would_hold_and_live_and_die_together(
    start: Any, tmp_path: Any, tools: Any
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("admin: {key_env: ADMIN_KEY}\n")
    router = await start("--workers", "2", "--config", str(file))
    await share_conversations(router, tools)
    await replace_a_worker(router, tools)
    await added_and_removed_everywhere(router, tools)
    await drain_everywhere(router, tools)
    left = router.workers()
    await router.stop(signal.SIGKILL)
    await tools.eventually(lambda: not any(_is_worker(worker) for worker in left), "they end with their parent")


async def share_conversations(router: Process, tools: Any) -> None:
    """Each turn has a connection of its own, so it may meet either worker."""
    history = ["hi"]
    text = ""
    for turn in range(8):
        answer = await router.client.chat(tools.chat_body(*history), conversation_id="c")
        assert answer.headers["x-kvduplex-plan"] == ("pull" if turn else "recompute")
        history += ["Hello there", f"more {turn}"]
        text = await kept(router)
    assert 'kvduplex_router_turns_total{api="chat",outcome="ok",plan="pull"} 7.0' in text
    assert "kvduplex_router_workers 2.0" in text
    assert "kvduplex_router_references 1.0" in text
    for _ in range(6):  # whichever worker is asked
        told = (await router.client("/admin/receipts?count=7", None, KEY)).json
        assert [each["plan"] for each in told] == ["pull"] * 7
        assert [each["at"] for each in told] == sorted((each["at"] for each in told), reverse=True)
        rates = (await router.client("/admin/hit-rate", None, KEY)).json
        assert (rates["workers_answered"], rates["of_workers"]) == (2, 2)
        assert [each["workload"] for each in rates["classes"]] == ["default"]


async def kept(router: Process) -> str:
    """Metrics once the turn's reference has reached the process that keeps it: it is sent after the answer."""
    async with asyncio.timeout(20):
        while True:
            text: str = (await router.client("/metrics", None, KEY)).body.decode()
            if "kvduplex_router_references 1.0" in text:
                return text
            await asyncio.sleep(0.01)


async def replace_a_worker(router: Process, tools: Any) -> None:
    first = router.workers()[0]
    first.kill()
    await tools.eventually(lambda: first not in router.workers() and len(router.workers()) == 2, "another runs")
    await ready(router)
    answers = [await router.client.chat() for _ in range(8)]
    assert {answer.status for answer in answers} == {200}


async def added_and_removed_everywhere(router: Process, tools: Any) -> None:
    """What an operator does at one worker process holds for all."""
    new = tools.Engine("new")
    await new.start()
    try:
        entry = {"url": new.url, "name": "new", "role": "decode"}
        assert (await router.client("/admin/engines", entry, KEY)).status == 201
        await everywhere(router, present=True)
        assert (await router.client("/admin/engines/new", None, KEY, method="DELETE")).status == 200
        await everywhere(router, present=False)
    finally:
        await new.stop()


async def everywhere(router: Process, *, present: bool) -> None:
    """Until many answers in a row, of whichever worker, agree."""
    async with asyncio.timeout(20):
        agreed = 0
        while agreed < 12:
            names = {engine["name"] for engine in (await router.client("/admin/engines", None, KEY)).json}
            agreed = agreed + 1 if ("new" in names) is present else 0


async def drain_everywhere(router: Process, tools: Any) -> None:
    engines = (await router.client("/admin/engines", None, KEY)).json
    name = next(engine["name"] for engine in engines if engine["role"] == "decode")
    await router.client(f"/admin/engines/{name}/drain", {}, KEY)
    loop = asyncio.get_running_loop()
    end = loop.time() + 10
    while {(await router.client.chat()).status for _ in range(12)} != {503}:
        assert loop.time() < end, "some worker still sends to the drained engine"
