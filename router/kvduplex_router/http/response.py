"""The answer to one exchange, as its reader sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from kvduplex_router.http.errors import AnswerTooLargeError, ExchangeError

__all__ = ["Response"]

_PAUSE_ABOVE_BYTES: Final = 256 * 1024
_BODILESS: Final = frozenset({204, 304})


class _Source(Protocol):
    """The connection, as far as a response needs it."""

    def abort(self) -> None:
        """Drop the connection."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read on."""


class Response:
    """The answer to one exchange: head first, then the body in pieces, then `close`.

    Attributes:
        consumer: Offered each part of the body as it arrives, before `read` is; returns whether it took it. A part it
            leaves waits for `read`, and so does everything after it until that was read.
        headers: Response headers, names in lower case.
        paused: Whether the engine is held back.
        status: HTTP status; 0 before the head.
    """

    __slots__ = (
        "_buffer",
        "_connection",
        "_done",
        "_error",
        "_size",
        "_waiter",
        "consumer",
        "headers",
        "paused",
        "status",
    )

    def __init__(self, connection: _Source) -> None:
        self._connection = connection
        self._buffer: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._done = False
        self._error: ExchangeError | None = None
        self.consumer: Callable[[bytes], bool] | None = None
        self.headers: dict[bytes, bytes] = {}
        self.status = 0
        self.paused = False

    @property
    def has_head(self) -> bool:
        """Whether status and headers have arrived."""
        return self.status != 0

    @property
    def content_type(self) -> str:
        """Media type without parameters, lower case."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection ends the body."""
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        return self.has_head and not framed and self.status not in _BODILESS

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            ExchangeError: They did not come.
        """
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """Everything that has arrived since the last call, waiting for at least one byte; empty at the end.

        Raises:
            ExchangeError: The body broke off; what had arrived before was returned by earlier calls.
        """
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self._done:
                return b""
            await self._wait()
        data = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        self._emptied()
        return data

    async def read_all(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            AnswerTooLargeError: It is longer than `limit` bytes.
            ExchangeError: It broke off.
        """
        parts: list[bytes] = []
        size = 0
        while part := await self.read():
            parts.append(part)
            size += len(part)
            if size > limit:
                self.close()
                raise AnswerTooLargeError(f"the engine's answer is larger than {limit} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Give up on the rest; a body not read to its end costs the connection."""
        if not self._done:
            self._connection.abort()

    # -- for the connection --------------------------------------------------------------------------------------

    def start(self, status: int) -> None:
        """The head is complete."""
        self.status = status

    def feed(self, data: bytes) -> None:
        """Part of the body; pauses the connection when too much waits unread."""
        self._buffer.append(data)
        self._size += len(data)
        if self._size > _PAUSE_ABOVE_BYTES and not self.paused:
            self.paused = True
            self._connection.pause()

    def finish(self, error: ExchangeError | None) -> None:
        """The body ended, with `error` when it was cut short."""
        self._done = True
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Pass on what arrived, or let the reader look again."""
        offered = self.consumer is not None and self._buffer and self._error is None
        if offered and self.consumer is not None and self._offer(self.consumer) and not self._done:
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _offer(self, consumer: Callable[[bytes], bool]) -> bool:
        if not consumer(self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)):
            return False
        self._emptied()
        return True

    def _emptied(self) -> None:
        self._buffer.clear()
        self._size = 0
        if self.paused:
            self.paused = False
            self._connection.resume()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
