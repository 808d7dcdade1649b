"""The stream parameter middleware over a real FastAPI app whose engine client is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from kvduplex_connector.stream_params import FRAME_OBJECT, StreamParamsMiddleware

PARAMS = {"remote_engine_id": "d0", "remote_block_ids": [[1, 2, 3]]}


@dataclass
class Output:
    text: str
    kv_transfer_params: dict[str, Any] | None = None


class EngineClient:
    """Yields two outputs, the last with the parameters it was told to return; can stall between them."""

    def __init__(self, *, stalls: bool = False) -> None:
        self.params: dict[str, Any] | None = PARAMS
        self._stalls = stalls
        self.ended = asyncio.Event()

    async def generate(self, _prompt: str) -> AsyncIterator[Output]:
        try:
            yield Output("a")
            if self._stalls:
                await asyncio.Event().wait()
            yield Output("b", self.params)
        finally:
            self.ended.set()


def make_app(client: EngineClient, generations: int = 1, split: bool = False) -> FastAPI:
    app = FastAPI()
    app.state.engine_client = client
    app.add_middleware(StreamParamsMiddleware)

    async def events() -> AsyncIterator[bytes]:
        for _ in range(generations):
            async for output in client.generate("p"):
                yield b"data: " + json.dumps({"text": output.text}).encode() + b"\n\n"
        if split:
            yield b'data: {"text": "data: [DONE]"}\n\n'
        yield b"data: [DONE]\n\n"

    @app.post("/stream")
    async def stream() -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/whole")
    async def whole(request: Request) -> Response:
        return JSONResponse([o.text async for o in client.generate((await request.body()).decode())])

    return app


async def post(app: FastAPI, path: str, leave_after: int | None = None) -> bytes:
    """One request straight through the ASGI interface; the client leaves after so many body messages."""
    body = bytearray()
    gone = asyncio.Event()
    sent = 0

    async def receive() -> dict[str, Any]:
        nonlocal sent
        sent += 1
        if sent == 1:
            return {"type": "http.request", "body": b"p"}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal leave_after
        body.extend(message.get("body", b""))
        if leave_after is not None and message["type"] == "http.response.body":
            leave_after -= 1
            if leave_after == 0:
                gone.set()

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "app": app}
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    return bytes(body)


def frames(body: bytes) -> list[Any]:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    return [event.decode() if event == b"[DONE]" else json.loads(event) for event in events]


async def test_frame_stands_between_the_last_chunk_and_done() -> None:
    body = await post(make_app(EngineClient()), "/stream")
    expected = {"object": FRAME_OBJECT, "choices": [], "kv_transfer_params": PARAMS}
    assert frames(body) == [{"text": "a"}, {"text": "b"}, expected, "[DONE]"]


async def test_stream_without_transfer_is_untouched() -> None:
    client = EngineClient()
    client.params = None
    assert frames(await post(make_app(client), "/stream")) == [{"text": "a"}, {"text": "b"}, "[DONE]"]


async def test_whole_reply_is_untouched() -> None:
    assert json.loads(await post(make_app(EngineClient()), "/whole")) == ["a", "b"]


async def test_several_generations_in_one_stream_name_no_blocks() -> None:
    body = await post(make_app(EngineClient(), generations=2), "/stream")
    assert FRAME_OBJECT.encode() not in body
    assert body.endswith(b"data: [DONE]\n\n")


async def test_end_mark_inside_generated_text_is_not_the_end() -> None:
    got = frames(await post(make_app(EngineClient(), split=True), "/stream"))
    assert [event if isinstance(event, str) else event.get("object", event.get("text")) for event in got] == [
        "a",
        "b",
        "data: [DONE]",
        FRAME_OBJECT,
        "[DONE]",
    ]


async def test_parallel_requests_do_not_see_each_others_parameters() -> None:
    app = make_app(EngineClient())
    for body in await asyncio.gather(*(post(app, "/stream") for _ in range(8))):
        assert sum(FRAME_OBJECT in str(frame) for frame in frames(body)) == 1


async def test_engine_generator_ends_when_the_client_leaves_a_stalled_stream() -> None:
    client = EngineClient(stalls=True)
    body = await post(make_app(client), "/stream", leave_after=1)
    assert frames(body) == [{"text": "a"}]
    async with asyncio.timeout(5):
        await client.ended.wait()
