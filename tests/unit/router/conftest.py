"""A router on a real socket, in front of scripted engines on real sockets, all in the test's own event loop.

A scripted engine answers each request with whatever bytes, pauses and connection endings its handler writes, and keeps
what it was sent. Helpers are handed out as fixtures, because test modules cannot import each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kvduplex.tinymodel.tokenizer import tokenizer_files, vocabulary
from kvduplex_router.compose import Router, compose
from kvduplex_router.config import build_config
from kvduplex_transfer.leases import messages
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.records import LeaseLimits
from kvduplex_transfer.leases.server import LeaseServer
from kvduplex_transfer.leases.table import LeaseTable

DEADLINE_S = 10.0


@dataclass
class Request:
    """What an engine was sent, and the way to answer it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, value: Any, status: int = 200, headers: str = "") -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        await self.raw(head.encode() + body)

    async def begin_stream(self) -> None:
        await self.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        await self.chunk(b"data: " + data + b"\n\n")

    async def end_stream(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.writer.transport.abort()

    async def wait_gone(self) -> None:
        """Until the router drops the connection."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass


Handler = Callable[[Request], Awaitable[None]]


class Engine:
    """A scripted engine; `handler` serves the generating paths."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[Request] = []
        self.handler: Handler = self.answer
        self.healthy = True
        self.turn = 0
        self.engine_id = f"{name}-identity"
        self.params_in_stream = True
        self.answer_text = "Hello there"
        self.cached_tokens: int | None = 3
        self.connections = 0
        self.hang_health = False
        self.facts: dict[str, Any] = {}
        self.hung_probes = 0
        self.probe_keys: list[str] = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections_open(self) -> int:
        return len(self._writers)

    @property
    def bodies(self) -> list[Any]:
        return [request.json for request in self.requests]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._server.wait_closed()

    def drop_connections(self) -> None:
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        try:
            while (request := await _read_request(reader, writer)) is not None:
                await self._dispatch(request)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _dispatch(self, request: Request) -> None:
        if request.target == "/health":
            self.probe_keys.append(request.headers.get("authorization", ""))
        if request.target == "/health" and self.hang_health:
            self.hung_probes += 1
            await request.wait_gone()
        elif request.target == "/health":
            await request.reply(b"", 200 if self.healthy else 503)
        elif request.target == "/v1/models":
            model = {"id": "m", "object": "model", **({"root": self.facts["root"]} if "root" in self.facts else {})}
            await request.reply({"object": "list", "data": [model]})
        elif request.target in ("/version", "/metrics", "/get_server_info"):
            fact = self.facts.get(request.target)
            found = fact if isinstance(fact, bytes) else json.dumps(fact).encode()
            await request.reply(found, 404 if fact is None else 200)
        else:
            self.requests.append(request)
            await self.handler(request)

    # -- ready-made behaviour ------------------------------------------------------------------------------------

    def params(self, **changes: Any) -> dict[str, Any]:
        self.turn += 1
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.engine_id, "remote_request_id": f"{self.name}-{self.turn}",
            "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, **changes,
        }  # fmt: skip

    def usage(self, completion: int = 1) -> dict[str, Any]:
        details = None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        return {
            "prompt_tokens": 10,
            "completion_tokens": completion,
            "total_tokens": 10 + completion,
            "prompt_tokens_details": details,
        }

    def message(self, body: dict[str, Any], text: str, params: Any) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        return {"id": "x", "model": "m", "choices": [choice], "usage": self.usage(), "kv_transfer_params": params}

    async def answer(self, request: Request) -> None:
        """What a well-behaved vLLM does in either role."""
        body = request.json
        if body.get("max_tokens") == 1 and not body.get("stream"):
            await request.reply(self.message(body, "x", self.params()))
        elif body.get("stream"):
            await self.stream(request)
        else:
            params = (
                self.params(do_remote_prefill=False, do_remote_decode=True) if "kv_transfer_params" in body else None
            )
            await request.reply(self.message(body, self.answer_text, params))

    async def stream(self, request: Request) -> None:
        body = request.json
        chat = "messages" in body
        await request.begin_stream()
        for i, word in enumerate(self.answer_text.split(" ")):
            piece = word if i == 0 else f" {word}"
            part: dict[str, Any] = {"delta": {"content": piece}} if chat else {"text": piece}
            await request.event({"id": "x", "choices": [{"index": 0, "finish_reason": None, **part}]})
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        await request.event({"id": "x", "choices": [{"index": 0, "finish_reason": "stop", **last}]})
        if self.params_in_stream and "kv_transfer_params" in body:
            params = self.params(do_remote_prefill=False, do_remote_decode=True)
            await request.event(
                {"id": "x", "object": "kvduplex.kv_transfer_params", "choices": [], "kv_transfer_params": params}
            )
        await request.event(b"[DONE]")
        await request.end_stream()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    method, target, _ = first.split(" ")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, target, headers, body, writer, reader)


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        return [frame.removeprefix("data: ") for frame in self.body.decode().split("\n\n") if frame]

    @property
    def text(self) -> str:
        """The streamed answer."""
        chunks = [json.loads(event) for event in self.events if event.startswith("{")]
        parts = [c["choices"][0] for c in chunks if c.get("choices")]
        return "".join(p.get("text") or p.get("delta", {}).get("content") or "" for p in parts)


class Client:
    """A bare HTTP client, one connection per request, that sees bytes."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=2**26)

    async def send(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.open()
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {
            "host": "router",
            "content-type": "application/json",
            "content-length": str(len(data)),
            **(headers or {}),
        }
        verb = method or ("GET" if body is None else "POST")
        head = f"{verb} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
        writer.write(head.encode("utf-8") + data)
        await writer.drain()
        return reader, writer

    async def __call__(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> Answer:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await self.send(path, body, headers, method)
            try:
                return await read_answer(reader)
            finally:
                writer.close()

    async def chat(self, body: Any = None, headers: dict[str, str] | None = None, /, **fields: Any) -> Answer:
        """One chat turn; `fields` go on top of a minimal body."""
        return await self("/v1/chat/completions", {**chat_body(), **(body or {}), **fields}, headers)


def chat_body(*texts: str) -> dict[str, Any]:
    roles = ["user", "assistant"]
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts or ("hi",))]}


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join([part async for part in read_chunks(reader)])
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Answer(int(first.split(" ")[1]), headers, body)


async def read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


async def eventually(condition: Callable[[], Any], what: str = "") -> None:
    """Poll until `condition` holds, or fail at the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_S
    while not condition():
        assert loop.time() < end, f"did not happen: {what}"
        await asyncio.sleep(0.005)


@dataclass
class Cluster:
    """A running router and its engines."""

    router: Router
    client: Client
    prefill: list[Engine]
    decode: list[Engine]
    replicas: list[Engine]
    stop_router: Callable[[], Awaitable[None]]
    another: Callable[..., Awaitable[Cluster]]
    after_ten: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def p(self) -> Engine:
        return self.prefill[0]

    @property
    def d(self) -> Engine:
        return self.decode[0]

    def metric(self, name: str, **labels: str) -> float:
        value = self.router.metrics.registry.get_sample_value(f"kvduplex_router_{name}", labels)
        return 0.0 if value is None else value

    def idle(self) -> bool:
        """Every counter of work in flight is at 0."""
        registry = self.router.metrics.registry
        names = ("kvduplex_router_turns_in_flight", "kvduplex_router_queued")
        return all(registry.get_sample_value(name) == 0 for name in names) and all(
            engine.in_flight == 0 for engine in self.router.fleet.engines
        )


ClusterMaker = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def make_cluster() -> AsyncIterator[ClusterMaker]:
    """A function that starts engines and a router: counts by role, then configuration keys."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            *, prefill: int = 1, decode: int = 1, engines: int = 0, leases: Any = None, clock: Any = None,
            entries: Callable[[Engine], dict[str, Any]] | None = None, **settings: Any,
        ) -> Cluster:  # fmt: skip
            groups: dict[str, list[Engine]] = {}
            for role, count in (("prefill", prefill), ("decode", decode), ("engines", engines)):
                groups[role] = [Engine(f"{role}{i}") for i in range(count)]
                for engine in groups[role]:
                    await engine.start()
                    stack.push_async_callback(engine.stop)
            lease = {"lease": "127.0.0.1:7999"} if leases is not None else {}
            extra = entries or (lambda _engine: {})
            configured = {
                role: [{"url": e.url, "name": e.name, **(lease if role == "decode" else {}), **extra(e)} for e in group]
                for role, group in groups.items()
            }
            options: dict[str, Any] = {} if clock is None else {"clock": clock}
            if leases is not None:
                options["lease_service"] = leases

            async def another(**more: Any) -> Cluster:
                """A router over the same engines."""
                config = build_config(None, **{**configured, "health": {"interval_s": 0.05}, **settings, **more})
                router = compose(config, **options)
                serving = await stack.enter_async_context(contextlib.AsyncExitStack())
                port = await _serve(serving, router)
                engines = (groups["prefill"], groups["decode"], groups["engines"])
                cluster = Cluster(router, Client(port), *engines, serving.aclose, another)
                await eventually(lambda: not router.fleet.missing(), "engines are up")
                return cluster

            return await another()

        yield make


async def _serve(stack: contextlib.AsyncExitStack, router: Router) -> int:
    """Serve as the real process does, less uvicorn's signal handling and start-up pauses."""
    await stack.enter_async_context(router.app.router.lifespan_context(router.app))
    settings = uvicorn.Config(router.asgi, ws="none", access_log=False, log_config=None, proxy_headers=False)
    settings.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: router.protocol(config=settings, server_state=state, app_state={}), "127.0.0.1", 0
    )

    async def stop() -> None:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*state.tasks, return_exceptions=True)
            await server.wait_closed()

    stack.push_async_callback(stop)
    return int(server.sockets[0].getsockname()[1])


@pytest.fixture
def tools() -> SimpleNamespace:
    """Helpers of this file that tests use by name."""
    return SimpleNamespace(
        chat_body=chat_body,
        dumps=lambda value: json.dumps(value).encode(),
        eventually=eventually,
        read_answer=read_answer,
        read_chunks=read_chunks,
        Engine=Engine,
        Client=Client,
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a byte-level tokenizer and a ChatML template."""
    folder = tmp_path_factory.mktemp("model")
    for name, content in tokenizer_files(vocabulary(), max_tokens=8192).items():
        (folder / name).write_bytes(content)
    return folder


class Leases:
    """The lease side of a scripted decode engine: the real table behind the real endpoint."""

    def __init__(self) -> None:
        self.engine_id = "engine-1"
        self.asked = 0
        self.table = LeaseTable(limits=LeaseLimits(budget_blocks=500), clock=time.monotonic)
        self.server = LeaseServer(
            table=self.table, identity=self._identity, source=lambda: None, host="127.0.0.1", port=0
        )
        self.server.start()

    @property
    def address(self) -> str:
        return self.server.endpoint.removeprefix("tcp://")

    @property
    def held(self) -> int:
        """Leases alive now."""
        return self.table.snapshot().held

    def entries(self, engine: Engine) -> dict[str, str]:
        """For `make_cluster`: this endpoint on every decode engine."""
        return {"lease": self.address} if engine.name.startswith("decode") else {}

    def _identity(self, nonce: int) -> messages.Identity:
        self.asked += nonce > 0
        return messages.Identity(nonce, self.engine_id, "m", "0.32", 32, b"f", 0, 0, 500, 30.0, 480.0)

    def alive(self, lease_id: str) -> bool:
        return lease_id in self.table.renew([lease_id])

    def script(self, engine: Engine) -> None:
        """Let the engine keep leases as the connector does: when a request ended or was aborted."""
        answer = engine.handler

        async def handler(request: Request) -> None:
            lease = (request.json.get("kv_transfer_params") or {}).get("lease")
            if lease and "id" in lease:
                self.table.hold(lease["id"], HashChain.of([b"h" * 32]), [1], lease.get("ttl_s"))
            await answer(request)

        engine.params_in_stream = False
        engine.handler = handler


@pytest.fixture
def leases() -> Iterator[Leases]:
    """Leases of a decode engine that is otherwise scripted."""
    made = Leases()
    yield made
    made.server.close()
