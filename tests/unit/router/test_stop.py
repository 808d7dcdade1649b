"""A router that is told to stop, with answers in flight: what their clients read, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

LIMIT_S = 20
LONG_S = 300


class Stopped:
    """A running ``python -m kvduplex_router`` whose decode engine's answers do not end."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, tools: Any, engines: list[Any]) -> None:
        self.process = process
        self.client = tools.Client(port)
        self.tools = tools
        self.prefill, self.decode = engines
        self.decode.handler = self._hang
        self.left = 0
        self.log = ""

    async def _hang(self, request: Any) -> None:
        """Of a stream the first frame; of a whole answer nothing; until the router gives the request up."""
        if request.target == "/v1/embeddings" or not request.json.get("stream"):
            await request.wait_gone()
        else:
            await request.begin_stream()
            await request.event({"id": "x", "choices": [{"index": 0, "delta": {"content": "Hello"}}]})
            await request.wait_gone()
        self.left += 1

    async def begin(self, path: str = "/v1/chat/completions", **fields: Any) -> asyncio.Task[Any]:
        """A request whose answer hangs; returns once the decode engine has it, and for streams once it has begun."""
        before = len(self.decode.requests)
        body = {**self.tools.chat_body(), "prompt": "hi", "input": "hi", "max_tokens": 4, **fields}
        reader, writer = await self.client.send(path, body)
        first = await reader.readuntil(b"Hello") if fields.get("stream") else b""
        await self.tools.eventually(lambda: len(self.decode.requests) > before)
        return asyncio.create_task(self._rest(first, reader, writer))

    async def begin_upload(self) -> asyncio.Task[Any]:
        """A request whose body stays incomplete; returns once the router waits for the rest."""
        reader, writer = await self.client.open()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n"
        writer.write(head)
        await reader.readuntil(b"100 Continue\r\n\r\n")
        return asyncio.create_task(self._rest(b"", reader, writer))

    async def _rest(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        """The answer, when it ends as HTTP has it; else an error is raised."""
        whole = asyncio.StreamReader()
        whole.feed_data(first + await reader.read())
        whole.feed_eof()
        writer.close()
        return await self.tools.read_answer(whole)

    async def ended(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            _, stderr = await self.process.communicate()
        self.log = stderr.decode()
        assert self.process.returncode is not None
        return self.process.returncode


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def start(tools: Any, tmp_path: Any) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(*, shutdown_s: float, workers: int = 1) -> Stopped:
            engines = [tools.Engine(role) for role in ("prefill", "decode")]
            for engine in engines:
                await engine.start()
                stack.push_async_callback(engine.stop)
            file = tmp_path / "router.yaml"
            file.write_text(json.dumps({"timeouts": {"shutdown_s": shutdown_s}, "workers": workers}))
            port = free_port()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvduplex_router", "--config", str(file), "--listen", f"127.0.0.1:{port}",
                "--prefill", engines[0].url, "--decode", engines[1].url,
                stderr=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            router = Stopped(process, port, tools, engines)
            stack.push_async_callback(_end, process)
            await _ready(router)
            return router

        yield make


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _ready(router: Stopped) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                if (await router.client("/ready")).status == 200:
                    return
            await asyncio.sleep(0.05)


STREAMS = [
    ("/v1/chat/completions", "data: "),
    ("/v1/completions", "data: "),
    ("/v1/responses", "event: error\ndata: "),
    ("/v1/messages", "event: error\ndata: "),
]


@pytest.mark.parametrize("workers", [1, 2])
async def test_turns_longer_than_the_router_waits_are_ended_with_an_error(start: Any, workers: int) -> None:
    router = await start(shutdown_s=1, workers=workers)
    streams = [await router.begin(path, stream=True) for path, _ in STREAMS]
    whole = [await router.begin("/v1/chat/completions"), await router.begin("/v1/embeddings")]
    whole.append(await router.begin_upload())
    router.process.send_signal(signal.SIGTERM)
    assert await router.ended() == 0
    for stream, (path, form) in zip(streams, STREAMS, strict=True):
        answer = await stream
        assert answer.status == 200
        last = answer.body.decode().removesuffix("\n\n").rpartition("\n\n")[2]
        assert last.startswith(form), path
        assert "the router is stopping" in json.loads(last.removeprefix(form))["error"]["message"]
        assert b"[DONE]" not in answer.body
    for answer in await asyncio.gather(*whole):
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        assert "the router is stopping" in answer.json["error"]["message"]
    await router.tools.eventually(lambda: router.left == 6, "the engine's work is stopped")
    lines = [line for line in router.log.splitlines() if "turns cut off: " in line]
    assert sum(int(line.partition("turns cut off: ")[2].partition(";")[0]) for line in lines) == 7
    assert 1 <= len(lines) <= workers
    assert all("timeouts.shutdown_s (1 s) is over" in line for line in lines)
    assert "Traceback" not in router.log


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(start: Any, number: int, workers: int) -> None:
    router = await start(shutdown_s=LONG_S, workers=workers)
    stream = await router.begin(stream=True)
    os.killpg(router.process.pid, number)  # as a terminal does: all processes are told
    await refused(router)
    assert not stream.done()
    router.process.send_signal(number)
    assert await router.ended() == 0
    assert "the router is stopping" in (await stream).body.decode()
    assert "turns cut off: 1; told twice to stop" in router.log
    assert "Traceback" not in router.log


async def refused(router: Stopped) -> None:
    """Until nobody listens any more: the router is stopping."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                _, writer = await router.client.open()
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.02)


async def test_clients_that_do_not_read_do_not_hold_it_up(start: Any, tools: Any) -> None:
    router = await start(shutdown_s=1)

    async def flood(request: Any) -> None:
        await request.begin_stream()
        with contextlib.suppress(ConnectionError):
            while True:
                await request.event({"choices": [{"index": 0, "delta": {"content": "x" * 100_000}}]})

    router.decode.handler = flood
    reader, writer = await router.client.send("/v1/chat/completions", {**tools.chat_body(), "stream": True})
    await reader.readuntil(b"data: ")
    writer.transport.pause_reading()
    router.process.send_signal(signal.SIGTERM)
    assert await router.ended() == 0
    writer.transport.abort()
    assert "Traceback" not in router.log


async def test_with_nothing_in_flight_it_waits_for_nothing(start: Any) -> None:
    router = await start(shutdown_s=LONG_S)
    _, writer = await router.client.send("/health")  # kept alive, and idle
    router.process.send_signal(signal.SIGTERM)
    assert await router.ended() == 0
    writer.close()
    assert "cut off" not in router.log
