"""The server side of client connections: uvicorn's protocol with deadlines and without avoidable work.

Added are a deadline for request heads, a callback when the client leaves (cheaper than a task that waits for it), and
one write for a response's head and the first part of its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvduplex_router.http.watchdog import NEVER, Watchdog

__all__ = ["CONNECTION", "ClientProtocol", "client_protocol"]

CONNECTION: Final = "kvduplex.connection"
"""Key of the ASGI scope under which the connection is found."""

_LAST_S: Final = 0.5
"""Seconds in which a client that had connected must have begun its request when the server stops."""
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
        self._last = False

    def shutdown(self) -> None:
        """The server is told to stop: a client that has only just connected may still ask, once."""
        asked: object = self.cycle  # None until a first request
        if asked is None and not self._last:
            self._last = True
            self.deadline = min(self.deadline, self.loop.time() + _LAST_S)
        else:
            super().shutdown()

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

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        self.deadline = self.loop.time() + self._header_s

    def on_headers_complete(self) -> None:
        """A request head is complete."""
        self.deadline = NEVER
        super().on_headers_complete()
        if self._last:
            self.cycle.keep_alive = False

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
