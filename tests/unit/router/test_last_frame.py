"""Clients that close as soon as they have read the last frame, as openai-python does: they had their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvduplex_router.requests.apis import ALL, CHAT

DONE = b"data: [DONE]\n\n"
USAGE = (
    b'"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":4}}'
)
ENDS = {
    "/v1/chat/completions": [b'data: {"choices":[{"index":0,"finish_reason":"stop","delta":{}}],%b}\n\n' % USAGE, DONE],
    "/v1/completions": [b'data: {"choices":[{"index":0,"finish_reason":"stop","text":""}],%b}\n\n' % USAGE, DONE],
    "/v1/responses": [b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'],
    "/v1/messages": [
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ],
    "/v1/audio/transcriptions": [DONE],
}
TEXT = b'data: {"choices":[],"text":"data: [DONE] \\"message_stop\\" \\"type\\":\\"response.completed\\""}\n\n'


async def leave(
    cluster: Any, tools: Any, path: str, *, until: bytes, end: Callable[[Any], Awaitable[None]] | None = None
) -> None:
    """One stream whose client closes when it has read `until`; its engine sends what follows, and `end`, after that."""
    engine = (cluster.replicas or cluster.decode)[0]
    left = asyncio.Event()

    async def answer(request: Any) -> None:
        await request.begin_stream()
        for frame in (TEXT, *ENDS[path]):
            await request.chunk(frame)
            if frame == until:
                await left.wait()
        await (end or request.__class__.end_stream)(request)

    engine.handler = answer
    body = {**tools.chat_body(), "prompt": "hi", "input": "hi", "max_tokens": 4, "stream": True}
    reader, writer = await cluster.client.send(path, body)
    await reader.readuntil(until)
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.05)  # so that the router has noticed, as a rule; the outcome is the same when it has not
    left.set()
    await tools.eventually(lambda: cluster.idle() and sum(outcomes(cluster).values()) == 1)


def outcomes(cluster: Any) -> dict[str, float]:
    (found,) = [each for each in cluster.router.metrics.registry.collect() if each.name == "kvduplex_router_turns"]
    return {each.labels["outcome"]: each.value for each in found.samples if each.name.endswith("_total")}


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("path", ENDS)
async def test_a_client_that_leaves_with_the_last_frame_was_answered(
    make_cluster: Any, tools: Any, path: str, replicas: int
) -> None:
    cluster = await make_cluster(engines=replicas, **({"prefill": 0, "decode": 0} if replicas else {}))
    await leave(cluster, tools, path, until=ENDS[path][-1])
    assert outcomes(cluster) == {"ok": 1}
    if replicas and USAGE in ENDS[path][0]:
        assert cluster.metric("cached_tokens_total", **{"class": "default"}) == 4  # the end was not lost with it


async def test_an_engine_that_does_not_end_its_stream_is_not_waited_for(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    await leave(cluster, tools, CHAT.path, until=DONE, end=lambda request: request.wait_gone())
    assert outcomes(cluster) == {"ok": 1}


@pytest.mark.parametrize("path", ENDS)
async def test_a_client_that_leaves_earlier_was_not(make_cluster: Any, tools: Any, path: str) -> None:
    cluster = await make_cluster()
    await leave(cluster, tools, path, until=TEXT, end=lambda request: request.wait_gone())
    assert outcomes(cluster) == {"client_gone": 1}


def test_every_api_is_here() -> None:
    assert {kind.path for kind in ALL} < set(ENDS)
