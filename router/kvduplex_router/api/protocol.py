"""The server side of client connections: uvicorn's protocol with deadlines and without avoidable work.

Added are a deadline for request heads, a callback when the client leaves (cheaper than a task that waits for it), one
for when the server waits no longer, and one write for a response's head and the first part of its body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvduplex_router.http.watchdog import NEVER, Watchdog
from kvduplex_router.requests.apis.openai_errors import OPENAI_ERRORS

__all__ = ["CONNECTION", "ClientProtocol", "client_protocol"]

CONNECTION: Final = "kvduplex.connection"
"""Key of the ASGI scope under which the connection is found."""

_LAST_S: Final = 0.5
"""Seconds in which a client that had connected must have begun its request when the server stops."""
_MAX_HEAD_BYTES: Final = 256 * 1024
"""Of a request; what one read brings of it comes on top."""
_UPGRADE: Final = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_HEAD: Final = b"HTTP/1.1 "
_CONTINUE: Final = b"HTTP/1.1 100"


class ClientProtocol(HttpToolsProtocol):
    """One client connection.

    Args:
        watchdog: Watches the deadline.
        header_s: Seconds a client has to complete a request head.
        **uvicorn: What uvicorn passes.
    """

    def __init__(self, *, watchdog: Watchdog, header_s: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._watchdog = watchdog
        self._header_s = header_s
        self.deadline = NEVER
        self.on_gone: Callable[[], None] | None = None
        self.on_cut: Callable[[], bool] | None = None
        self._last = False
        self._in_head = True
        self._head_bytes = 0
        self._heads = 0

    def shutdown(self) -> None:
        """The server is told to stop: a client that has only just connected may still ask, once."""
        asked: object = self.cycle  # None until a first request
        if asked is None and not self._last:
            self._last = True
            self.deadline = min(self.deadline, self.loop.time() + _LAST_S)
        else:
            super().shutdown()

    def cut(self) -> bool:
        """The server waits no longer: end the request with an error; returns whether there was one to end."""
        return self.on_cut is not None and self.on_cut()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(cast("asyncio.Transport", _OneWrite(transport)))
        self.deadline = self.loop.time() + self._header_s
        self._watchdog.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self.deadline = NEVER
        self._watchdog.discard(self)
        super().connection_lost(exc)
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._in_head and (offer := _UPGRADE.search(data, 0, max(data.find(b"\r\n\r\n"), 0) or len(data))):
            # An offer of HTTP/2 or WebSocket is declined by not seeing it; the parser would end the request at its
            # head, and clients like Java's make one with every body.
            data = b"".join((data[: offer.start()], b"\r\nx-declined-upgrade:", data[offer.end() :]))
        began_in_head, heads = self._in_head, self._heads
        super().data_received(data)
        if began_in_head and self._heads == heads:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", "the request's head is too large")

    def send_400_response(self, msg: str) -> None:
        """What came is no request."""
        self._refuse(b"400 Bad Request", msg)

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer outside a request and close; in the middle of another response only close."""
        if self.transport.is_closing():
            return
        asked: Any = self.cycle
        if asked is None or asked.response_complete:
            body = orjson.dumps(OPENAI_ERRORS.body("invalid_request_error", message, None, "bad_request"))
            lines = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            self.transport.write(_HEAD + status + b"\r\n" + lines + b"\r\n" + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        self.deadline = self.loop.time() + self._header_s

    def on_headers_complete(self) -> None:
        """A request head is complete."""
        self.deadline = NEVER
        self._in_head = False
        self._heads += 1
        super().on_headers_complete()
        if self._last:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """A request is complete; what comes next is the head of another."""
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def on_response_complete(self) -> None:
        """A response is complete; one to HEAD is a head alone."""
        cast("_OneWrite", self.transport).flush()
        super().on_response_complete()

    @property
    def takes_chunks(self) -> bool:
        """Whether a chunked response has begun and the client does not lag."""
        cycle = self.cycle
        return bool(cycle.chunked_encoding) and not (
            self.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the response while `takes_chunks`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def on_deadline(self) -> None:
        """The head took too long."""
        self.deadline = NEVER
        self.transport.abort()


class _OneWrite:
    """A transport that holds a response head back until the next write, or until the response is complete."""

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_HEAD) and not data.startswith(_CONTINUE):
            self._head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write a head that nothing followed."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def client_protocol(watchdog: Watchdog, *, header_s: float) -> Any:
    """A factory in the place of uvicorn's protocol class."""

    def make(**uvicorn: Any) -> ClientProtocol:
        return ClientProtocol(watchdog=watchdog, header_s=header_s, **uvicorn)

    return make
