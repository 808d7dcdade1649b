"""Engines telling each other about blocks, where real ones shake hands and notify: datagrams on the engine's port.

A reader asks whether a request's blocks are still there, and says when it has read them. No KV moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

__all__ = ["SideChannel"]

_ANSWER_WITHIN_S: Final = 1.0
_MESSAGE: Final[msgspec.msgpack.Decoder[tuple[str, int, str, str]]] = msgspec.msgpack.Decoder(tuple[str, int, str, str])


class SideChannel(asyncio.DatagramProtocol):
    """One engine's end.

    Args:
        readable: Tokens kept for a reader, by engine id and request id; None when there are none.
        done: Told that a request's blocks have been read.
    """

    def __init__(self, *, readable: Callable[[str, str], int | None], done: Callable[[str], None]) -> None:
        self._readable = readable
        self._done = done
        self._waiting: dict[int, asyncio.Future[int | None]] = {}
        self._number = 0
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = transport  # type: ignore[assignment]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """A message, or something else."""
        try:
            kind, number, engine, request = _MESSAGE.decode(data)
        except msgspec.DecodeError:
            return
        if kind == "read":
            tokens = self._readable(engine, request)
            self._send(addr, "there" if tokens else "gone", number, str(tokens or 0), request)
        elif kind == "done":
            self._done(request)
        elif (waiting := self._waiting.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(int(engine) if kind == "there" and engine.isdigit() else None)

    async def ask(self, host: str, port: int, engine: str, request: str) -> int | None:
        """Tokens that `engine` keeps of `request`; None when it keeps none, is another one, or does not answer."""
        self._number += 1
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        try:
            self._send((host, port), "read", self._number, engine, request)
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(self._number, None)

    def tell_done(self, host: str, port: int, engine: str, request: str) -> None:
        """The blocks of `request` have been read, or will not be."""
        self._send((host, port), "done", 0, engine, request)

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.close()

    def _send(self, address: tuple[str, int], *message: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(msgspec.msgpack.encode(message), address)
