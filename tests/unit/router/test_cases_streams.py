"""Rows S1-S6 and C1: bytes as they came, when they came, and an end to the work when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


async def _until_started(tools: Any, engine: Any, count: int = 1) -> None:
    await tools.eventually(lambda: len(engine.requests) >= count, f"{engine.name} was asked")


FRAMES = (
    'data: {"id":"é","choices":[{"index":0,"delta":{"content":"数据 😀 \\u2028"}}]}\n\n'
    ": a comment\n\n"
    'event: x\ndata: {"choices":[{"index":0,\ndata: "delta":{}}]}\n\n'
    'data: {"choices":[{"index":0,"delta":{"content":"line sep \u2028 inside"}}]}\r\n\r\n'
    'id: 7\rdata: {"choices":[]}\r\r'
    'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    "data: [DONE]\n\n"
).encode()


@pytest.mark.parametrize("reuse", ["stock", "off"])
async def test_s1_streams_split_at_every_byte_come_out_identical(make_cluster: Any, reuse: str) -> None:
    cluster = await make_cluster(reuse=reuse)

    async def answer(request: Any) -> None:
        await request.begin_stream()
        for index in range(len(FRAMES)):
            await request.chunk(FRAMES[index : index + 1])
        await request.end_stream()

    cluster.d.handler = answer
    got = await cluster.client.chat(stream=True)
    assert got.body == FRAMES


async def test_s1_a_frame_of_many_megabytes(make_cluster: Any) -> None:
    cluster = await make_cluster()
    big = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 5_000_000)
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

    async def answer(request: Any) -> None:
        await request.begin_stream()
        await request.chunk(big)
        await request.chunk(end)
        await request.end_stream()

    cluster.d.handler = answer
    assert (await cluster.client.chat(stream=True)).body == big + end


async def test_s1_a_frame_beyond_the_limit_breaks_the_stream(make_cluster: Any) -> None:
    cluster = await make_cluster(limits={"frame_bytes": 100_000})

    async def answer(request: Any) -> None:
        await request.begin_stream()
        await request.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        for _ in range(20):
            await request.chunk(b"y" * 10_000)
        await request.wait_gone()

    cluster.d.handler = answer
    got = await cluster.client.chat(stream=True)
    assert '"error"' in got.events[-1]
    assert b"yyy" not in got.body


@pytest.mark.parametrize(
    ("prefill_cached", "decode_cached", "shown"),
    [(3, 9, {"cached_tokens": 3}), (99, 9, {"cached_tokens": 10}), (None, 9, None), (3, None, None)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_s4_cached_tokens_are_those_of_the_hop_that_computed_the_prompt(
    make_cluster: Any, prefill_cached: Any, decode_cached: Any, shown: Any, stream: bool
) -> None:
    cluster = await make_cluster()
    cluster.p.cached_tokens, cluster.d.cached_tokens = prefill_cached, decode_cached

    async def answer(request: Any) -> None:
        await request.begin_stream()
        await request.event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]})
        await request.event({"choices": [], "usage": cluster.d.usage(5)})
        await request.event(b"[DONE]")
        await request.end_stream()

    if stream:
        cluster.d.handler = answer
    got = await cluster.client.chat(stream=stream, stream_options={"include_usage": True} if stream else None)
    chunks = [json.loads(event) for event in got.events[:-1]] if stream else [got.json]
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens_details"] == shown
    assert usage["prompt_tokens"] == 10
    expected = None if prefill_cached is None else str(min(prefill_cached, 10))
    assert got.headers.get("x-kvduplex-cached-tokens") == expected


async def test_s4_without_include_usage_no_usage_is_made_up(make_cluster: Any) -> None:
    cluster = await make_cluster()
    assert b'"usage"' not in (await cluster.client.chat(stream=True)).body


async def test_s6_chunks_are_forwarded_one_by_one(make_cluster: Any, tools: Any) -> None:
    """Each chunk is sent only after the client has seen the one before."""
    cluster = await make_cluster()
    seen = asyncio.Semaphore(0)

    async def answer(request: Any) -> None:
        await request.begin_stream()
        for number in range(20):
            await request.event({"choices": [{"index": 0, "delta": {"content": f"{number} "}}]})
            await seen.acquire()
        await request.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await request.event(b"[DONE]")
        await request.end_stream()

    cluster.d.handler = answer
    async with asyncio.timeout(10):
        reader, writer = await cluster.client.send("/v1/chat/completions", {**tools.chat_body(), "stream": True})
        await reader.readuntil(b"\r\n\r\n")
        async for _part in tools.read_chunks(reader):
            seen.release()
        writer.close()


async def test_a_slow_reader_bounds_what_the_router_takes_in(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    sent = [0]
    piece = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 65_536)

    async def answer(request: Any) -> None:
        await request.begin_stream()
        for _ in range(1500):  # 100 MB
            await request.chunk(piece)
            sent[0] += len(piece)

    cluster.d.handler = answer
    reader, writer = await cluster.client.send("/v1/chat/completions", {**tools.chat_body(), "stream": True})
    writer.transport.pause_reading()
    before = -1
    while sent[0] != before:  # until the engine is held back
        before = sent[0]
        await asyncio.sleep(0.3)
    assert sent[0] < 40_000_000
    writer.transport.abort()
    await tools.eventually(cluster.idle, "the turn ends")
    del reader


async def test_a_client_that_stops_reading_is_let_go(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(timeouts={"client_write_s": 0.3})

    async def answer(request: Any) -> None:
        await request.begin_stream()
        while True:
            await request.event({"choices": [{"index": 0, "delta": {"content": "x" * 65_536}}]})

    cluster.d.handler = answer
    _reader, writer = await cluster.client.send("/v1/chat/completions", {**tools.chat_body(), "stream": True})
    writer.transport.pause_reading()
    await _until_started(tools, cluster.d)
    await tools.eventually(cluster.idle, "the turn ends")
    assert cluster.metric("turns_total", api="chat", plan="recompute", outcome="client_gone") == 1
    writer.transport.abort()


async def _hang(request: Any) -> None:
    await request.wait_gone()
    request.gone.set()


async def _hang_in_stream(request: Any) -> None:
    await request.begin_stream()
    await request.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
    await request.wait_gone()
    request.gone.set()


async def test_c1_a_client_that_leaves_at_the_end_mark_has_had_its_answer(make_cluster: Any, tools: Any) -> None:
    """openai-python closes its connection at ``[DONE]``, before the stream's own end has come."""
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        request.end_stream = request.wait_gone
        await cluster.d.stream(request)

    cluster.d.handler = answer
    body = {**tools.chat_body(), "stream": True, "conversation_id": "c1"}
    reader, writer = await cluster.client.send("/v1/chat/completions", body)
    await reader.readuntil(b"[DONE]")
    writer.close()
    await tools.eventually(lambda: cluster.metric("turns_in_flight") == 0)
    cluster.d.handler = cluster.d.answer
    second = tools.chat_body("hi", "Hello there", "and then?")
    answered = await cluster.client.chat(second, conversation_id="c1")
    assert answered.headers["x-kvduplex-plan"] == "pull"


@pytest.mark.parametrize("leave", ["fin", "reset"])
@pytest.mark.parametrize("when", ["prefill", "decode_head", "mid_stream"])
async def test_c1_a_client_that_leaves_ends_the_work_within_a_second(
    make_cluster: Any, tools: Any, when: str, leave: str
) -> None:
    cluster = await make_cluster()
    engine = cluster.p if when == "prefill" else cluster.d
    engine.handler = _hang_in_stream if when == "mid_stream" else _hang
    reader, writer = await cluster.client.send("/v1/chat/completions", {**tools.chat_body(), "stream": True})
    await _until_started(tools, engine)
    if when == "mid_stream":
        await reader.readuntil(b'"x"')
    left = time.monotonic()
    writer.transport.abort() if leave == "reset" else writer.close()
    await asyncio.wait_for(engine.requests[0].gone.wait(), 5)
    await tools.eventually(cluster.idle, "the counters are back to 0")
    assert time.monotonic() - left < 1.0
    if when == "prefill":
        assert cluster.d.requests == []
    assert cluster.metric("turns_total", api="chat", plan="recompute", outcome="client_gone") == 1
    assert cluster.metric("breaker_open", engine=engine.name, role=engine.name[:-1]) == 0


async def test_c1_a_client_that_leaves_while_sending_its_body(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    _reader, writer = await cluster.client.open()
    writer.write(b'POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 1000\r\n\r\n{"model"')
    await writer.drain()
    await tools.eventually(lambda: cluster.metric("turns_in_flight") == 1, "the request began")
    writer.close()
    await tools.eventually(cluster.idle, "it ended")
    assert cluster.p.requests == []


async def test_pipelined_and_repeated_requests_on_one_connection(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    body = json.dumps(tools.chat_body()).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"
    one = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    reader, writer = await cluster.client.open()
    async with asyncio.timeout(10):
        writer.write(one * 3)
        answers = [await tools.read_answer(reader) for _ in range(3)]
        writer.write(one)
        answers.append(await tools.read_answer(reader))
    assert [answer.status for answer in answers] == [200] * 4
    writer.close()


async def test_bodies_may_come_chunked_and_after_100_continue(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    body = json.dumps(tools.chat_body()).encode()
    reader, writer = await cluster.client.open()
    async with asyncio.timeout(10):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n")
        writer.write(b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        for index in range(0, len(body), 7):
            piece = body[index : index + 7]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        assert (await tools.read_answer(reader)).status == 200
    writer.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused_before_it_is_read(
    make_cluster: Any, tools: Any, chunked: bool
) -> None:
    cluster = await make_cluster(limits={"body_bytes": 100_000})
    reader, writer = await cluster.client.open()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\n"
    async with asyncio.timeout(10):
        if chunked:
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(30):
                writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        else:
            writer.write(head + b"content-length: 900000000\r\n\r\n" + b"x" * 300_000)
        answer = await tools.read_answer(reader)
    assert answer.status == 413
    assert "100000 bytes" in answer.json["error"]["message"]
    writer.transport.abort()
    await tools.eventually(cluster.idle, "it ended")


async def test_a_slow_upload_is_ended(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(timeouts={"upload_s": 0.3})
    reader, writer = await cluster.client.open()
    async with asyncio.timeout(10):
        writer.write(b'POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 1000\r\n\r\n{"a"')
        answer = await tools.read_answer(reader)
    assert answer.status == 408
    writer.transport.abort()
    await tools.eventually(cluster.idle, "it ended")


async def test_a_request_head_that_never_ends_is_dropped(make_cluster: Any) -> None:
    cluster = await make_cluster(timeouts={"header_s": 0.3})
    reader, writer = await cluster.client.open()
    async with asyncio.timeout(10):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nx-a: b\r\n")
        assert await reader.read() == b""
    writer.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    noise=st.binary(max_size=120),
    start=st.sampled_from([b"", b"POST /v1/completions HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n\r\n"]),
)
async def test_any_bytes_on_a_client_connection_leave_the_router_serving(
    make_cluster: Any, tools: Any, noise: bytes, start: bytes
) -> None:
    if not hasattr(make_cluster, "made"):
        make_cluster.made = await make_cluster()
    cluster = make_cluster.made
    reader, writer = await cluster.client.open()
    writer.write(start + noise)
    writer.write_eof()
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    writer.close()
    assert (await cluster.client("/health")).status == 200
    await tools.eventually(cluster.idle, "nothing is left of it")
