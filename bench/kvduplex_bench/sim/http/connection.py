"""HTTP/1.1 connections of a simulated engine: httptools below, one request at a time above."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import httptools

__all__ = ["Connection", "Handler", "HttpRequest", "Responder"]

_log = logging.getLogger(__name__)
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A complete request."""

    method: str
    path: str
    body: bytes


class Responder:
    """Writes one response."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.started = False

    def whole(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """A complete response."""
        self.started = True
        phrase = HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def stream(self, first: bytes) -> None:
        """The head and the first part of a stream of events."""
        self.started = True
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._transport.write(head + _chunk(first))

    def part(self, data: bytes) -> None:
        """A further part."""
        self._transport.write(_chunk(data))

    def end(self, data: bytes = b"") -> None:
        """The last part of a stream."""
        self._transport.write((_chunk(data) if data else b"") + b"0\r\n\r\n")

    def break_off(self) -> None:
        """Close without an end, as a dying engine does."""
        self._transport.abort()


Handler = Callable[[HttpRequest, Responder], Awaitable[None]]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One client.

    Args:
        handler: Answers requests; cancelled when the client leaves.
        open_connections: Where it is listed while it is open.
    """

    def __init__(self, handler: Handler, open_connections: set[Connection]) -> None:
        self._handler = handler
        self._open = open_connections
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[HttpRequest] = deque()
        self._task: asyncio.Task[None] | None = None
        self._url = b""
        self._body: list[bytes] = []
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")  # noqa: S101 - uvloop's own
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It left."""
        del exc
        self._open.discard(self)
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        """Its path."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Part of its body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """It is complete."""
        path = self._url.partition(b"?")[0].decode("latin-1")
        self._waiting.append(HttpRequest(self._parser.get_method().decode(), path, b"".join(self._body)))
        if self._task is None:
            self._next()

    def finish(self) -> None:
        """Close when what is being answered has been; a request behind it is not begun, so it may be sent elsewhere."""
        self._closing = True
        if self._task is None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    @property
    def answering(self) -> asyncio.Task[None] | None:
        """What answers a request now."""
        return self._task

    def _next(self) -> None:
        if self._closing:
            self._transport.close()
        elif self._waiting:
            self._task = asyncio.get_running_loop().create_task(self._answer(self._waiting.popleft()))

    async def _answer(self, request: HttpRequest) -> None:
        responder = Responder(self._transport)
        try:
            await self._handler(request, responder)
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - a request boundary
            _log.exception("%s %s failed", request.method, request.path)
            responder.break_off()
        finally:
            self._task = None
            if not self._transport.is_closing():
                self._next()
