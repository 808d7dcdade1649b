"""A streaming HTTP client that costs little: one connection a request, the clock read at the socket."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import httptools

__all__ = ["Reply", "ask"]


@dataclass(slots=True)
class Reply:
    """What came back.

    Attributes:
        status: HTTP status; 0 when there was none.
        asked: When the request was sent, in seconds of the loop's clock.
        first: When the first part with content came.
        ended: When it was complete, or broke.
        body: All of it.
        error: What went wrong; empty when nothing did.
    """

    status: int = 0
    asked: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    body: bytearray = field(default_factory=bytearray)
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether the answer is complete."""
        return not self.error and self.status == 200  # noqa: PLR2004 - OK


class _Exchange(asyncio.Protocol):
    def __init__(self, message: bytes) -> None:
        self._message = message
        self._parser = httptools.HttpResponseParser(self)
        self.reply = Reply()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.reply.asked = time.perf_counter()
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._finish(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"connection lost before the answer was complete: {exc or 'closed'}")

    def on_body(self, data: bytes) -> None:
        if not self.reply.first:
            self.reply.first = time.perf_counter()
        self.reply.body += data

    def on_message_complete(self) -> None:
        self.reply.ended = time.perf_counter()
        self.reply.status = self._parser.get_status_code()
        self._finish("")

    def _finish(self, error: str) -> None:
        if not self.done.done():
            self.reply.error = error
            self.reply.ended = self.reply.ended or time.perf_counter()
            self.done.set_result(None)
            self._transport.close()


async def ask(port: int, body: bytes, headers: dict[str, str], *, timeout_s: float) -> Reply:
    """Send a chat request to loopback and read its answer.

    Never raises for what the server does; the reply says what went wrong.
    """
    head = [
        "POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json",
        f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items()), "", "",
    ]  # fmt: skip
    message = "\r\n".join(head).encode() + body
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            transport, exchange = await loop.create_connection(lambda: _Exchange(message), "127.0.0.1", port)
            try:
                await exchange.done
            finally:
                transport.close()
    except TimeoutError:
        return Reply(error=f"no complete answer within {timeout_s:g} s")
    except OSError as error:
        return Reply(error=f"not connected: {error.strerror or error}")
    return exchange.reply
