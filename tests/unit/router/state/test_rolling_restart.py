"""Two router processes that share conversations and a file of engines, restarted one after the other under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

KEY = {"authorization": "Bearer admin-secret"}
DEADLINE_S = 40.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """One ``python -m kvduplex_router`` at a fixed port."""

    def __init__(self, tools: Any, *arguments: str) -> None:
        self.port = free_port()
        self.client = tools.Client(self.port)
        self._arguments = ("--listen", f"127.0.0.1:{self.port}", *arguments)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = (sys.executable, "-m", "kvduplex_router", *self._arguments)
        quiet = {**os.environ, "ADMIN_KEY": "admin-secret"}
        self._process = await asyncio.create_subprocess_exec(*command, env=quiet, stderr=asyncio.subprocess.DEVNULL)
        async with asyncio.timeout(DEADLINE_S):
            while not await self.ready():
                assert self._process.returncode is None, "the router did not start"
                await asyncio.sleep(0.05)

    async def ready(self) -> bool:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if (await self.client("/ready")).status != 200:
                return False
            text = (await self.client("/metrics", None, KEY)).body
            return b"state_up 0" not in text
        return False

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await self._process.wait() == 0


class Balancer:
    """What a load balancer does: the next router that takes the connection."""

    def __init__(self, routers: list[Process]) -> None:
        self._routers = routers
        self._turn = 0

    async def chat(self, body: dict[str, Any], **fields: Any) -> Any:
        self._turn += 1
        for attempt in range(len(self._routers) * 50):
            router = self._routers[(self._turn + attempt) % len(self._routers)]
            with contextlib.suppress(ConnectionRefusedError):
                return await router.client.chat(body, **fields)
            await asyncio.sleep(0.01)
        raise AssertionError("no router takes connections")


class Conversation:
    """Turns without a pause, each as soon as the last was answered."""

    def __init__(self, name: str, balancer: Balancer, tools: Any) -> None:
        self.statuses: Counter[int] = Counter()
        self.plans: Counter[str] = Counter()
        self._name, self._balancer, self._tools = name, balancer, tools

    async def run(self, go_on: asyncio.Event) -> None:
        history = ["hi"]
        while go_on.is_set():
            body = self._tools.chat_body(*history[-9:])
            answer = await self._balancer.chat(body, conversation_id=self._name)
            self.statuses[answer.status] += 1
            self.plans[answer.headers.get("x-kvduplex-plan", "none")] += 1
            history += ["Hello there", "more"]


async def test_a_rolling_restart_fails_no_request_and_uses_no_handle_twice(
    server: Any, tools: Any, tmp_path: Path
) -> None:
    file, config = tmp_path / "engines.yaml", tmp_path / "router.yaml"
    config.write_text("admin: {key_env: ADMIN_KEY}\nhealth: {interval_s: 0.1}\ndiscovery: {file_interval_s: 0.1}\n")
    engines = [tools.Engine(role) for role in ("prefill", "decode")]
    for engine in engines:
        engine.params_in_stream = False
        await engine.start()
    lease = f"127.0.0.1:{free_port()}"  # nobody renews there; the leases' names are what counts here
    file.write_text(json.dumps({"prefill": [engines[0].url], "decode": [f"{engines[1].url}#lease={lease}"]}))
    flags = ("--config", str(config), "--engines-file", str(file), "--state", server.url)
    routers = [Process(tools, *flags) for _ in range(2)]
    go_on = asyncio.Event()
    go_on.set()
    try:
        await asyncio.gather(*(router.start() for router in routers))
        talks = [Conversation(f"c{i}", Balancer(routers), tools) for i in range(4)]
        running = [asyncio.create_task(talk.run(go_on)) for talk in talks]
        for router in routers:
            watcher = await watched(router)
            await router.stop()
            watcher.close()
            await router.start()
        go_on.clear()
        await asyncio.gather(*running)
    finally:
        go_on.clear()
        for each in (*routers, *engines):
            await each.stop()
    statuses = sum((talk.statuses for talk in talks), Counter[int]())
    assert set(statuses) == {200}
    assert statuses[200] > 100
    plans = sum((talk.plans for talk in talks), Counter[str]())
    assert plans["pull"] > 0.8 * statuses[200], "conversations went on across restarts"
    claims = Counter(
        body["kv_transfer_params"]["lease_claim"]["id"]
        for body in engines[0].bodies
        if "lease_claim" in body["kv_transfer_params"]
    )
    assert set(claims.values()) == {1}


async def watched(router: Process) -> Any:
    """Leave a stream of the dashboard open: it must not hold the router up when that is told to stop."""
    reader, writer = await router.client.send("/dashboard/events", None, KEY)
    async with asyncio.timeout(DEADLINE_S):
        while not (line := await reader.readline()).startswith(b"data: "):
            assert line
    assert len(json.loads(line[6:])["engines"]) == 2
    return writer
