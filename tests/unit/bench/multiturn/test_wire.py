"""The client against real loopback servers that cut their answers in every place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from kvduplex_bench.errors import BenchError, UnreachableError
from kvduplex_bench.multiturn.chat import chat_body, read_reply
from kvduplex_bench.multiturn.wire import BrokenExchangeError, Exchange, Origin, exchange


@asynccontextmanager
async def server(parts: Sequence[bytes], *, pause_s: float = 0.0) -> AsyncIterator[tuple[Origin, list[bytes]]]:
    """Answers each request with `parts`, each in a write of its own, and closes the connection."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                seen.append(head + await reader.readexactly(length))
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    tasks: list[asyncio.Task[None]] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.ensure_future(answer(reader, writer)))

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listening:
        yield Origin.parse(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", option="--url"), seen
        if pause_s > 1:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def sse(*chunks: object) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def token(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def chunked(body: bytes, size: int) -> bytes:
    cuts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(cut), cut) for cut in cuts) + b"0\r\n\r\n"


HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-kvduplex-plan: pull\r\nx-kvduplex-cached-tokens: 64\r\n"
)
BODY = sse(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    token("Grüße"),
    token(", "),
    token("数据\n\nend"),
    {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 3}},
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 4096])
async def test_any_chunking_gives_the_same_answer(size: int) -> None:
    raw = HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(BODY, size)
    writes = [raw[at : at + 11] for at in range(0, len(raw), 11)]
    async with server(writes) as (origin, _):
        reply = read_reply(await exchange(origin, "/v1/chat/completions", b"{}", timeout_s=10))
    assert reply.text == "Grüße, 数据\n\nend"
    assert (reply.prompt_tokens, reply.answer_tokens, reply.cached_tokens, reply.plan) == (100, 3, 64, "pull")
    assert len(reply.gaps_s) == 2
    assert 0 < reply.ttft_s <= reply.e2e_s


async def test_events_may_end_with_carriage_returns_and_a_read_within_them() -> None:
    body = BODY.replace(b"\n\n", b"\r\n\r\n")
    at = body.index(b"\r\n\r\n") + 1
    async with server([HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:at], body[at:]], pause_s=0.02) as (
        o,
        _,
    ):
        assert read_reply(await exchange(o, "/", b"{}", timeout_s=10)).text == "Grüße, 数据\n\nend"


async def test_a_body_without_length_ends_with_the_connection() -> None:
    async with server([b"HTTP/1.1 200 OK\r\n\r\n", b"one", b"two"]) as (origin, _):
        answer = await exchange(origin, "/", timeout_s=10)
    assert answer.body == b"onetwo"


async def test_times_are_those_of_the_reads_and_not_of_the_parsing() -> None:
    answer = Exchange(status=200, sent_at=10.0)
    first, rest = BODY[: BODY.index(b"data: ", 60)], BODY[BODY.index(b"data: ", 60) :]
    cut = rest.index(b"\n\n") + 1  # the second event is whole only with the third read
    answer.pieces = [(10.5, first), (11.0, rest[:cut]), (12.0, rest[cut:])]
    reply = read_reply(answer)
    assert (reply.ttft_s, reply.e2e_s) == (2.0, 2.0)
    assert reply.gaps_s == (0.0, 0.0)


async def test_the_request_is_what_was_asked_for() -> None:
    body = chat_body("m", [{"role": "user", "content": "hé"}], answer_tokens=5, conversation="c-1")
    async with server([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"]) as (origin, seen):
        await exchange(origin, "/v1/chat/completions", body, headers={"authorization": "Bearer k"}, timeout_s=10)
    head, _, sent = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"authorization: Bearer k" in head
    value = json.loads(sent)
    assert (value["max_tokens"], value["stream"], value["conversation_id"]) == (5, True, "c-1")
    assert (value["min_tokens"], value["ignore_eos"]) == (5, True)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([HEAD + b"content-length: 100\r\n\r\nshort"], "closed before the answer ended"),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhel"], "closed before the answer ended"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP"),
        ([], "closed before the answer ended"),
    ],
)
async def test_answers_that_do_not_end_are_errors(parts: list[bytes], message: str) -> None:
    async with server(parts) as (origin, _):
        with pytest.raises(BrokenExchangeError, match=message):
            await exchange(origin, "/", b"{}", timeout_s=10)


async def test_silence_ends_at_the_deadline() -> None:
    async with server([b"HTTP/1.1 200 OK\r\n"], pause_s=5) as (origin, _):
        with pytest.raises(BrokenExchangeError, match="no complete answer within"):
            await exchange(origin, "/", timeout_s=0.1)


async def test_a_body_beyond_the_limit_is_an_error() -> None:
    async with server([b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 2000], pause_s=0.02) as (origin, _):
        with pytest.raises(BrokenExchangeError, match="larger than"):
            await exchange(origin, "/", timeout_s=10, body_limit=1000)


async def test_nobody_there_is_said_with_the_url() -> None:
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:1 cannot be reached"):
        await exchange(Origin.parse("http://127.0.0.1:1", option="--url"), "/", timeout_s=5)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:notaport"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="--url"):
        Origin.parse(url, option="--url")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, b'{"error":{"message":"broken"}}', "answered 500.*broken"),
        (200, b'data: {"error":{"message":"gone"}}\n\n', "stream ended in an error"),
        (200, b"data: [DONE]\n\n", "held no text"),
        (200, b"data: nonsense\n\n", "not JSON"),
    ],
)
def test_answers_without_an_answer_are_errors(status: int, body: bytes, message: str) -> None:
    with pytest.raises(BrokenExchangeError, match=message):
        read_reply(Exchange(status=status, pieces=[(1.0, body)]))
