"""The official OpenAI and Anthropic clients work unchanged."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest


@pytest.fixture
async def cluster(make_cluster: Any) -> Any:
    return await make_cluster()


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{cluster.client.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="anything", max_retries=0) as made:
        yield made


async def test_openai_chat_whole_and_streamed_over_two_turns(cluster: Any, client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = await client.chat.completions.create(model="m", messages=messages)
    assert first.choices[0].message.content == "Hello there"
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    stream = await client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == "Hello there"
    handed = cluster.p.bodies[1]["kv_transfer_params"]
    assert handed["remote_request_id"] == "decode0-1", "recognised without an id"


async def test_openai_named_conversation_and_headers(cluster: Any, client: openai.AsyncOpenAI) -> None:
    for plan in ("recompute", "pull"):
        extra = [] if plan == "recompute" else [("assistant", "Hello there"), ("user", "more")]
        history = [{"role": role, "content": text} for role, text in [("user", "hi"), *extra]]
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=history, extra_body={"conversation_id": "c"}  # type: ignore[arg-type]
        )  # fmt: skip
        assert raw.headers["x-kvduplex-plan"] == plan
        assert raw.parse()._request_id == raw.headers["x-request-id"]


async def test_openai_text_completions_models_and_errors(cluster: Any, client: openai.AsyncOpenAI) -> None:
    completion = await client.completions.create(model="m", prompt="Once")
    assert completion.choices[0].text == "Hello there"
    assert [model.id async for model in client.models.list()] == ["m"]

    async def refuse(request: Any) -> None:
        await request.reply({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 400)

    cluster.p.handler = refuse
    with pytest.raises(openai.BadRequestError, match="too long"):
        await client.completions.create(model="m", prompt="Once")
    await cluster.p.stop()
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model="m", prompt="Once")


async def test_openai_sees_an_error_in_a_stream_that_breaks(cluster: Any, client: openai.AsyncOpenAI) -> None:
    async def broken(request: Any) -> None:
        await request.begin_stream()
        await request.event(
            {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "x"}}]}
        )
        request.reset()

    cluster.d.handler = broken
    stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
    with pytest.raises(openai.APIError, match="broke off"):
        async for _chunk in stream:
            pass


async def test_anthropic_messages(cluster: Any) -> None:
    async def answer(request: Any) -> None:
        body = request.json
        params = cluster.d.params(do_remote_prefill=body["max_tokens"] == 1)
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None,
                   "usage": {"input_tokens": 10, "output_tokens": 2}}  # fmt: skip
        content = [{"type": "text", "text": "Hello there"}]
        if not body.get("stream"):
            await request.reply(
                {**message, "content": content, "stop_reason": "end_turn", "kv_transfer_params": params}
            )
            return
        await request.begin_stream()
        block = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": "Hello there"}
        for name, value in (
            ("message_start", {"message": {**message, "content": [], "stop_reason": None}}),
            ("content_block_start", {"index": 0, "content_block": block}),
            ("content_block_delta", {"index": 0, "delta": delta}),
            ("content_block_stop", {"index": 0}),
            ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}),
            ("message_stop", {}),
        ):
            await request.chunk(f"event: {name}\ndata: ".encode() + _json({"type": name, **value}) + b"\n\n")
        await request.end_stream()

    cluster.p.handler = cluster.d.handler = answer
    url = f"http://127.0.0.1:{cluster.client.port}"
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="anything", max_retries=0) as client:
        whole = await client.messages.create(model="m", max_tokens=20, messages=messages)
        assert whole.content[0].text == "Hello there"  # type: ignore[union-attr]
        async with client.messages.stream(model="m", max_tokens=20, messages=messages) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Hello there"
        with pytest.raises(anthropic.BadRequestError, match="conversation_id"):
            await client.messages.create(model="m", max_tokens=20, messages=messages, extra_body={"conversation_id": 1})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
