"""Messages over a stream socket between processes of one router: whole as they come, no task per message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from kvduplex_router.workers.messages import FromHub, FromWorker, encode

__all__ = ["Channel"]

_PREFIX: Final = 4


class Channel(asyncio.Protocol):
    """One end.

    A peer that does not read what it is sent is not listened to until it does, so nothing grows without bound.

    Args:
        on_made: Told when the connection is there.
        on_body: Told every message's body; what it sends meanwhile goes out together.
        on_lost: Told when the connection is over.
    """

    def __init__(
        self,
        *,
        on_made: Callable[[Channel], None],
        on_body: Callable[[Channel, bytes], None],
        on_lost: Callable[[Channel], None],
    ) -> None:
        self._on_made = on_made
        self._on_body = on_body
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()

    def send(self, message: FromWorker | FromHub) -> None:
        """Write a message, unless the connection is over."""
        if self._transport is not None:
            self._transport.write(encode(message))

    def close(self) -> None:
        """End the connection once what was sent is written."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # what a stream socket gives; uvloop's is no subclass
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        unread = self._unread
        unread += data
        start = 0
        while len(unread) >= start + _PREFIX:
            body = start + _PREFIX
            end = body + int.from_bytes(unread[start:body], "big")
            if len(unread) < end:
                break
            self._on_body(self, bytes(unread[body:end]))
            start = end
        del unread[:start]

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, _exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = None
        self._on_lost(self)
