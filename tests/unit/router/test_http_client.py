"""The HTTP client: any legal answer is read whole, any illegal one is an error, nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvduplex_router.http.errors import (
    AnswerTooLargeError,
    BrokenAnswerError,
    ConnectError,
    ExchangeError,
    StaleConnectionError,
    StalledError,
)
from kvduplex_router.http.pool import Origin, Pool, Timeouts
from kvduplex_router.http.request import forwardable, get_request, post_head, post_request
from kvduplex_router.http.watchdog import Watchdog

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server whose behaviour is a function of the connection, and a pool of connections to it."""

    def __init__(self, serve: Serve, **timeouts: float) -> None:
        self._serve = serve
        self._limits = Timeouts(**{"connect_s": 5, "first_byte_s": 5, "idle_s": 5, **timeouts})
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.watchdog = Watchdog(tick_s=0.02)
        self.pool = Pool(Origin("http", "127.0.0.1", port), timeouts=self._limits, watchdog=self.watchdog)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pool.close()
        self.watchdog.close()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._serve(reader, writer)
        writer.close()

    async def get(self, *, resend: bool = True) -> tuple[int, bytes]:
        async with asyncio.timeout(10):
            response = await self.pool.send(get_request(self.pool.origin, "/"), resend=resend)
            try:
                return response.status, await response.read_all(10_000_000)
            finally:
                response.close()


def always(*pieces: bytes, close: bool = False) -> Serve:
    """Answer every request with these writes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return serve


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "close", "body"),
    [
        (OK + b"content-length: 2\r\n\r\nhi", False, b"hi"),
        (OK + b"content-length: 0\r\n\r\n", False, b""),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", False, b"hi"),
        (OK + b"Transfer-Encoding: Chunked\r\n\r\n2;x=y\r\nhi\r\n0\r\nx-trailer: 1\r\n\r\n", False, b"hi"),
        (OK + b"\r\nhi", True, b"hi"),
        (OK + b"connection: close\r\n\r\n", True, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nhi", False, b"hi"),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK + b"content-length: 2\r\n\r\nhi", False, b"hi"),
        (b"HTTP/1.0 200 OK\r\n\r\nhi", True, b"hi"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, b""),
    ],
)
async def test_legal_answers(answer: bytes, close: bool, body: bytes) -> None:
    for pieces in ([answer], [answer[i : i + 1] for i in range(len(answer))]):
        async with Peer(always(*pieces, close=close)) as peer:
            for _ in range(2):
                assert (await peer.get())[1] == body


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"HTTP/1.1", b"garbage\r\n\r\n", b"HTTP/9.9 200 OK\r\n\r\n", OK + b"content-length: 5\r\n\r\nhi",
        OK + b"content-length: x\r\n\r\nhi", OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nhi",
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\nhi",
        OK + b"transfer-encoding: chunked\r\n\r\nzz\r\nhi", OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi",
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhiXX", OK + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nraw",
        OK + b"no colon\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\x00",
    ],
    ids=lambda raw: repr(raw[:30]),
)  # fmt: skip
async def test_illegal_answers(answer: bytes) -> None:
    async with Peer(always(answer, close=True)) as peer:
        with pytest.raises(BrokenAnswerError):
            await peer.get()
        await _no_connection(peer)


async def _no_connection(peer: Peer) -> None:
    await _until(lambda: not peer.pool.open_connections)


async def _until(condition: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + 5
    while not condition():
        assert loop.time() < end
        await asyncio.sleep(0.005)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    noise=st.binary(max_size=300),
    start=st.sampled_from([b"", OK, OK + b"\r\n", OK + b"transfer-encoding: chunked\r\n\r\n"]),
)
async def test_any_bytes_end_in_an_answer_or_an_error(noise: bytes, start: bytes) -> None:
    async with Peer(always(start + noise, close=True), first_byte_s=2, idle_s=2) as peer:
        try:
            status, body = await peer.get()
        except ExchangeError:
            return
        assert 100 <= status <= 999
        assert len(body) <= len(start + noise)


@st.composite
def framed(draw: st.DrawFn) -> tuple[bytes, bytes, list[int]]:
    """A legal answer, its body, and where to cut it."""
    parts = draw(st.lists(st.binary(min_size=1, max_size=50), max_size=8))
    body = b"".join(parts)
    if draw(st.booleans()):
        raw = OK + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    else:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        raw = OK + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    cuts = sorted(set(draw(st.lists(st.integers(0, len(raw)), max_size=6))))
    return raw, body, cuts


@settings(max_examples=100, deadline=None)
@given(answer=framed())
async def test_answers_cut_anywhere_are_read_whole(answer: tuple[bytes, bytes, list[int]]) -> None:
    raw, body, cuts = answer
    edges = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    async with Peer(always(*pieces)) as peer:
        assert [await peer.get() for _ in range(2)] == [(200, body)] * 2
        assert peer.connections == 1


async def test_connections_are_reused_and_the_last_used_first() -> None:
    async with Peer(always(OK + b"content-length: 2\r\n\r\nhi")) as peer:
        for _ in range(5):
            await peer.get()
        assert peer.connections == 1
        await asyncio.gather(*(peer.get() for _ in range(4)))
        assert peer.connections <= 4


async def test_nothing_listening_is_a_connect_error() -> None:
    async with Peer(always(b"")) as peer:
        peer._server.close()
        with pytest.raises(ConnectError) as failed:
            await peer.get()
        assert failed.value.consumed is False


@pytest.mark.parametrize("resend", [True, False])
async def test_a_pooled_connection_closed_under_a_request(resend: bool) -> None:
    """The first connection answers once and ends when asked again, as a keep-alive that ran out does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: 2\r\n\r\nhi")
        await reader.readuntil(b"\r\n\r\n")

    async with Peer(serve) as peer:
        assert await peer.get() == (200, b"hi")
        if resend:
            assert await peer.get() == (200, b"hi")
            assert peer.connections == 2
        else:
            with pytest.raises(StaleConnectionError):
                await peer.get(resend=False)


async def test_a_fresh_connection_that_breaks_is_not_tried_again() -> None:
    async with Peer(always(b"", close=True)) as peer:
        with pytest.raises(BrokenAnswerError):
            await peer.get()
        assert peer.connections == 1


async def test_silence_before_and_within_an_answer() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 5\r\n\r\nhi")
        await reader.read()

    for serve in (silent, half):
        async with Peer(serve, first_byte_s=0.1, idle_s=0.1) as peer:
            with pytest.raises(StalledError):
                await peer.get()
            await _no_connection(peer)


async def test_a_consumer_that_lags_is_not_silence() -> None:
    total = 3_000_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: %d\r\n\r\n" % total + b"x" * total)
        await writer.drain()
        await reader.read()

    async with Peer(serve, idle_s=0.2) as peer:
        response = await peer.pool.send(get_request(peer.pool.origin, "/"))
        await asyncio.sleep(0.5)
        assert len(await response.read_all(total)) == total


async def test_an_answer_beyond_the_limit_is_dropped() -> None:
    async with Peer(always(OK + b"content-length: 100\r\n\r\n" + b"x" * 100)) as peer:
        response = await peer.pool.send(get_request(peer.pool.origin, "/"))
        with pytest.raises(AnswerTooLargeError):
            await response.read_all(50)


async def test_an_answer_given_up_costs_its_connection() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"\r\n")
        while True:
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.001)

    async with Peer(endless) as peer:
        response = await peer.pool.send(get_request(peer.pool.origin, "/"))
        assert await response.read()
        response.close()
        await _no_connection(peer)


async def test_bytes_nobody_asked_for_end_a_connection() -> None:
    async with Peer(always(OK + b"content-length: 2\r\n\r\nhi" + OK + b"content-length: 2\r\n\r\nno")) as peer:
        for _ in range(3):
            assert await peer.get() == (200, b"hi")
        assert peer.connections == 3


async def test_a_cancelled_wait_drops_the_connection() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Peer(silent) as peer:
        task = asyncio.create_task(peer.get())
        await _until(lambda: peer.connections)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await _no_connection(peer)


def test_requests_are_built_as_written() -> None:
    origin = Origin.parse("http://[::1]:81")
    assert origin.authority == "[::1]:81"
    assert Origin.parse("https://h").port == 443
    raw = post_request(post_head(origin, "/v1/x"), b"a: b\r\n", b"{}")
    assert raw.startswith(b"POST /v1/x HTTP/1.1\r\nhost: [::1]:81\r\n")
    assert raw.endswith(b"a: b\r\ncontent-length: 2\r\n\r\n{}")


def test_a_header_that_could_end_its_line_is_left_out() -> None:
    assert forwardable([(b"a", b"1\r\nb: 2"), (b"c", b"3")]) == b"c: 3\r\n"
