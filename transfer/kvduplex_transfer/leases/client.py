"""The router's view of lease endpoints: renew, release, and notice a restart. asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import zmq
import zmq.asyncio

from kvduplex_transfer.leases import messages
from kvduplex_transfer.leases.curve import CurveClient
from kvduplex_transfer.leases.errors import LeaseUnreachableError, MalformedFrameError
from kvduplex_transfer.leases.params import check_endpoint, check_lease_id, check_ttl_s

__all__ = ["AsyncLeaseClient"]

_R = TypeVar("_R", messages.Identity, messages.Renewed, messages.Released)

_QUEUED_FRAMES: Final = 256
_MAX_WAITING: Final = 4096


class AsyncLeaseClient:
    """Talks to the lease endpoint of one decode engine, from one event loop.

    Safe to share between tasks. Connects in the background and reconnects by itself; every call has a deadline.

    Args:
        endpoint: ``tcp://HOST:PORT``.
        timeout_s: Seconds to wait for an answer.
        curve: Keys, or None for an open endpoint.

    Raises:
        InvalidLeaseError: `endpoint` is malformed.
        LeaseConfigError: A key file is wrong.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = 1.0, curve: CurveClient | None = None) -> None:
        self.endpoint = check_endpoint(endpoint)
        self._timeout_s = timeout_s
        self._curve = curve
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[messages.Reply]] = {}
        self._nonce = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def hello(self) -> messages.Identity:
        """Who answers there, and how full it is; a changed ``engine_id`` means that its leases are gone.

        Raises:
            LeaseUnreachableError: No answer in time.
        """
        return await self._ask(messages.Hello(self._next()), messages.Identity)

    async def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> frozenset[str]:
        """Let leases live `ttl_s` seconds from now, None for the engine's own time; returns those still alive.

        Raises:
            InvalidLeaseError: An id or the time is malformed.
            LeaseUnreachableError: No answer in time. Renewing again is harmless.
        """
        ttl_s = None if ttl_s is None else check_ttl_s(ttl_s)
        alive: set[str] = set()
        for batch in _batches(lease_ids):
            reply = await self._ask(messages.Renew(self._next(), batch, ttl_s), messages.Renewed)
            alive.update(reply.leases)
        return frozenset(alive)

    async def release(self, lease_ids: Iterable[str]) -> frozenset[str]:
        """End leases; returns those that were alive.

        Raises:
            InvalidLeaseError: An id is malformed.
            LeaseUnreachableError: No answer in time. They end by themselves.
        """
        ended: set[str] = set()
        for batch in _batches(lease_ids):
            reply = await self._ask(messages.Release(self._next(), batch), messages.Released)
            ended.update(reply.leases)
        return frozenset(ended)

    async def close(self) -> None:
        """Close the connection; calls that wait raise `LeaseUnreachableError`. Idempotent."""
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
            self._reader = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LeaseUnreachableError(f"lease client of {self.endpoint} was closed"))
        self._waiting.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = self._socket = None

    def _next(self) -> int:
        self._nonce += 1
        return self._nonce

    async def _ask(self, request: messages.Hello | messages.Renew | messages.Release, expected: type[_R]) -> _R:
        if len(self._waiting) >= _MAX_WAITING:
            raise LeaseUnreachableError(f"lease endpoint {self.endpoint}: {_MAX_WAITING} calls wait for it already")
        socket = self._connected()
        future: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request.nonce] = future
        try:
            async with asyncio.timeout(self._timeout_s):
                await socket.send(messages.encode(request))
                reply = await future
        except TimeoutError:
            raise LeaseUnreachableError(
                f"lease endpoint {self.endpoint}: no answer within {self._timeout_s:g} s; is the decode engine up, and "
                "is its lease_port reachable from here?"
            ) from None
        finally:
            self._waiting.pop(request.nonce, None)
        if not isinstance(reply, expected):
            raise LeaseUnreachableError(f"lease endpoint {self.endpoint} answered with {type(reply).__name__}")
        return reply

    def _connected(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            self._context = zmq.asyncio.Context(io_threads=1)
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.maxmsgsize = messages.MAX_FRAME_BYTES
            socket.sndhwm = socket.rcvhwm = _QUEUED_FRAMES
            socket.ipv6 = True
            socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
            socket.heartbeat_ivl, socket.heartbeat_timeout = 2000, 6000
            socket.routing_id = b"r" + secrets.token_bytes(15)  # names this connection across reconnects
            if self._curve is not None:
                self._curve.apply(socket)
            socket.connect(self.endpoint)
            self._socket = socket
            self._reader = asyncio.get_running_loop().create_task(self._read(socket))
        return self._socket

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            with contextlib.suppress(MalformedFrameError):
                reply = messages.decode_reply(frames[-1])
                nonce = reply.number if isinstance(reply, (messages.Granted, messages.Refused)) else reply.nonce
                future = self._waiting.get(nonce)
                if future is not None and not future.done():
                    future.set_result(reply)


def _batches(lease_ids: Iterable[str]) -> Sequence[list[str]]:
    ids = [check_lease_id(lease_id) for lease_id in lease_ids]
    size = messages.MAX_LEASES_PER_MESSAGE
    return [ids[start : start + size] for start in range(0, len(ids), size)]
