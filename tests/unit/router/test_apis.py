"""The Responses and Messages APIs over scripted engines that answer as vLLM does."""

from __future__ import annotations

import json
from typing import Any

import pytest

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def response(engine: Any, text: str, params: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {
        "id": "resp_1", "object": "response", "status": "completed",
        "output": [{"type": "message", "role": "assistant", "content": content}],
        "usage": {"input_tokens": 10, "input_tokens_details": {"cached_tokens": engine.cached_tokens}},
        "kv_transfer_params": params,
    }  # fmt: skip


def message(engine: Any, text: str, params: Any) -> dict[str, Any]:
    cached = engine.cached_tokens or 0
    written = 5 if cached < 5 else 0  # of vLLM's ten prompt tokens, apart from the input like those read
    usage = {"input_tokens": 10 - cached - written, "cache_read_input_tokens": cached,
             "cache_creation_input_tokens": written, "output_tokens": 2}  # fmt: skip
    made = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": text}],
            "stop_reason": "end_turn", "usage": usage}  # fmt: skip
    return made if params is None else {**made, "kv_transfer_params": params}


async def _event(request: Any, name: str, value: dict[str, Any]) -> None:
    await request.chunk(f"event: {name}\ndata: {json.dumps({'type': name, **value})}\n\n".encode())


def script_responses(engine: Any) -> None:
    async def handler(request: Any) -> None:
        body = request.json
        params = engine.params(do_remote_prefill=body.get("max_output_tokens") == 1)
        if not body.get("stream"):
            await request.reply(response(engine, "Hello", params))
            return
        await request.begin_stream()
        await _event(request, "response.created", {"response": response(engine, "", None)})
        await _event(request, "response.output_text.delta", {"delta": "Hello"})
        await _event(request, "response.completed", {"response": response(engine, "Hello", params)})
        await request.end_stream()

    engine.handler = handler


def script_messages(engine: Any) -> None:
    async def handler(request: Any) -> None:
        body = request.json
        params = engine.params(do_remote_prefill=body.get("max_tokens") == 1)
        if not body.get("stream"):
            await request.reply(message(engine, "Hello", params))
            return
        await request.begin_stream()
        await _event(request, "message_start", {"message": {**message(engine, "", None), "stop_reason": None}})
        await _event(request, "content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "Hello"}})
        await _event(request, "message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}})
        await _event(request, "message_stop", {})
        await request.end_stream()

    engine.handler = handler


@pytest.fixture
async def both(make_cluster: Any) -> Any:
    async def make(script: Any) -> Any:
        cluster = await make_cluster()
        for engine in (cluster.p, cluster.d):
            script(engine)
        return cluster

    return make


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_goes_through_both_engines(both: Any, stream: bool) -> None:
    cluster = await both(script_responses)
    cluster.d.cached_tokens = 9
    answer = await cluster.client(RESPONSES, {"model": "m", "input": "hi", "stream": stream, "max_output_tokens": 20})
    assert answer.status == 200
    assert b"kv_transfer_params" not in answer.body.replace(b'"kv_transfer_params": null', b"")
    assert b'"cached_tokens":3' in answer.body.replace(b" ", b"")
    assert answer.headers["x-kvduplex-cached-tokens"] == "3"
    assert cluster.p.bodies[0]["max_output_tokens"] == 1
    assert cluster.d.bodies[0]["max_output_tokens"] == 20
    assert cluster.d.bodies[0]["kv_transfer_params"]["remote_request_id"] == "prefill0-1"
    if stream:
        assert answer.body.count(b"event: ") == 3
        assert b"event: response.completed\ndata: " in answer.body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_goes_through_both_engines(both: Any, stream: bool) -> None:
    cluster = await both(script_messages)
    cluster.d.cached_tokens = 9
    body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    answer = await cluster.client(MESSAGES, body)
    assert answer.status == 200
    assert b"kv_transfer_params" not in answer.body
    squeezed = answer.body.replace(b" ", b"")
    assert b'"cache_read_input_tokens":3' in squeezed
    assert b'"input_tokens":7' in squeezed
    assert cluster.p.bodies[0]["max_tokens"] == 1
    assert cluster.d.bodies[0]["max_tokens"] == 20
    counted = [cluster.metric(f"{name}_tokens_total", **{"class": "default"}) for name in ("prompt", "cached")]
    assert counted == [10, 3]
    assert cluster.metric("prompt_mismatches_total") == 0


async def test_errors_of_the_messages_api_are_spelt_its_way(both: Any) -> None:
    cluster = await both(script_messages)
    for answer, kind in (
        (await cluster.client(MESSAGES, b"{"), "invalid_request_error"),
        (await cluster.client(MESSAGES, {"messages": [], "conversation_id": 1}), "invalid_request_error"),
    ):
        assert answer.status == 400
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == kind


@pytest.mark.parametrize(("path", "script"), [(RESPONSES, script_responses), (MESSAGES, script_messages)])
async def test_a_stream_that_breaks_ends_in_an_error_event(both: Any, path: str, script: Any) -> None:
    cluster = await both(script)

    async def broken(request: Any) -> None:
        await request.begin_stream()
        await _event(request, "first", {})
        request.reset()

    cluster.d.handler = broken
    answer = await cluster.client(path, {"model": "m", "input": "x", "messages": [], "max_tokens": 5, "stream": True})
    last = answer.body.decode().rstrip("\n").split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert "upstream_error" in last


async def test_a_response_that_belongs_to_one_engine_stays_whole(both: Any) -> None:
    cluster = await both(script_responses)
    answer = await cluster.client(RESPONSES, {"model": "m", "input": "x", "previous_response_id": "resp_0"})
    assert answer.headers["x-kvduplex-plan"] == "aggregate"
    assert cluster.p.requests == []
