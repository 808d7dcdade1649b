"""A streaming HTTP client that costs little: the clock is read at the socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import httptools

__all__ = ["Ask", "Line", "Reply", "ask", "asked_over", "message"]

Ask = Callable[[bytes, Mapping[str, str], float], Awaitable["Reply"]]
"""Sends a chat request's body and headers and reads the answer within so many seconds; never raises."""


@dataclass(slots=True)
class Reply:
    """What came back.

    Attributes:
        status: HTTP status; 0 when there was none.
        asked: When the request was sent, in seconds of the loop's clock.
        first: When the first part with content came.
        ended: When it was complete, or broke.
        body: All of it.
        plan: The plan that the router named; empty when it named none.
        heard: Whether a byte came.
        error: What went wrong; empty when nothing did.
    """

    status: int = 0
    asked: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    body: bytearray = field(default_factory=bytearray)
    plan: str = ""
    heard: bool = False
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether the answer is complete."""
        return not self.error and self.status == 200  # noqa: PLR2004 - OK


class Line(asyncio.Protocol):
    """One connection, for one exchange after the other."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, port: int) -> Self:
        """Connect to loopback.

        Raises:
            OSError: Nobody takes the connection.
        """
        _, line = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return line

    @property
    def usable(self) -> bool:
        """Whether it may carry another exchange."""
        return self._reply is None and not self._transport.is_closing()

    async def exchange(self, sent: bytes) -> Reply:
        """Send a message and read its answer; the reply says what went wrong."""
        reply = self._reply = Reply(asked=time.perf_counter())
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(sent)
        await self._done
        return reply

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is up."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        if self._reply is None:  # nothing was asked
            self._transport.close()
            return
        self._reply.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._finish(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._finish(f"connection lost before the answer was complete: {exc or 'closed'}")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer."""
        if self._reply is not None and name.lower() == b"x-kvduplex-plan":
            self._reply.plan = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        """Part of the answer's body."""
        if self._reply is not None:
            self._reply.first = self._reply.first or time.perf_counter()
            self._reply.body += data

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()
            self._finish("", keep=self._parser.should_keep_alive())

    def _finish(self, error: str, *, keep: bool = False) -> None:
        reply, self._reply = self._reply, None
        if not keep:
            self._transport.close()
        if reply is not None and self._done is not None and not self._done.done():
            reply.error, reply.ended = error, time.perf_counter()
            self._done.set_result(None)


def message(body: bytes, headers: Mapping[str, str]) -> bytes:
    """A chat request as it is sent."""
    head = [
        "POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json",
        f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items()), "", "",
    ]  # fmt: skip
    return "\r\n".join(head).encode() + body


async def asked_over(exchange: Callable[[], Awaitable[Reply]], timeout_s: float) -> Reply:
    """What `exchange` brings within `timeout_s`; a reply that says so when it takes longer or nobody is there."""
    asked = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            return await exchange()
    except TimeoutError:
        error = f"no complete answer within {timeout_s:g} s"
    except OSError as refused:
        error = f"not connected: {refused.strerror or refused}"
    return Reply(asked=asked, ended=time.perf_counter(), error=error)


async def ask(port: int, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Reply:
    """Send a chat request to loopback over a connection of its own, and read its answer.

    Never raises for what the server does; the reply says what went wrong.
    """

    async def exchange() -> Reply:
        line = await Line.open(port)
        try:
            return await line.exchange(message(body, headers))
        finally:
            line.close()

    return await asked_over(exchange, timeout_s)
