"""ZeroMQ sockets to one engine's events, read in the event loop and never for long at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvduplex_router.clock import Clock
from kvduplex_router.events.feed import Feed, FeedCounts
from kvduplex_router.events.index import BlockIndex
from kvduplex_router.events.trust import TrustKeeper

__all__ = ["Subscriber"]

_log = logging.getLogger("kvduplex.router.events")
_AT_ONCE_S: Final = 0.002
_PAUSE_S: Final = 0.002
_QUEUED: Final = 50_000
_RECONNECT_MS: Final = 100
_RECONNECT_MAX_MS: Final = 5_000
_MESSAGE_MAX: Final = 64 * 1024 * 1024
_HEARTBEAT_MS: Final = 5_000
_UP: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED
_GONE: Final = zmq.EVENT_DISCONNECTED


class Subscriber:
    """Follows one engine until closed; must be made inside the event loop.

    Args:
        engine: The engine's name.
        events: ``HOST:PORT`` of its publisher.
        replay: ``HOST:PORT`` of its replays; None when it has none.
        rank: Its data-parallel rank, see `Feed`.
        index: Where its blocks are entered.
        trust: Its trust.
        clock: Monotonic seconds.
        context: ZeroMQ's.
        counts: What arrived, over all subscribers.
    """

    def __init__(
        self,
        engine: str,
        *,
        events: str,
        replay: str | None,
        rank: int | None = None,
        index: BlockIndex,
        trust: TrustKeeper,
        clock: Clock,
        context: zmq.Context[Any],
        counts: FeedCounts,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self.endpoints = (events, replay, rank)
        self._events = _socket(context, zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._events.get_monitor_socket(_UP | _GONE)
        self._replay = None if replay is None else _socket(context, zmq.DEALER)
        ask = None if self._replay is None else self._ask
        self.feed = Feed(engine, index=index, trust=trust, clock=clock, ask=ask, rank=rank, counts=counts)
        self._resume: asyncio.TimerHandle | None = None
        self._sockets = [each for each in (self._monitor, self._replay, self._events) if each is not None]
        for each in self._sockets:
            self._loop.add_reader(_fd(each), self._read)
        self._events.connect(f"tcp://{events}")
        if self._replay is not None:
            self._replay.connect(f"tcp://{replay}")
        self._read()

    def close(self) -> None:
        """Stop following."""
        if self._resume is not None:
            self._resume.cancel()
        for each in self._sockets:
            self._loop.remove_reader(_fd(each))
        self._events.disable_monitor()
        for each in self._sockets:
            each.close(linger=0)
        self._sockets.clear()

    def tick(self) -> None:
        """To be called about once a second."""
        self.feed.tick()
        self._read()

    def _ask(self, number: int) -> None:
        assert self._replay is not None  # noqa: S101 - `ask` is given only then
        try:
            self._replay.send_multipart([b"", number.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the feed gives up at its deadline
            _log.info("asking %s for a replay failed: %s", self.endpoints[1], error)

    def _read(self) -> None:
        """Take what has arrived, for a moment at most; ZeroMQ reports readiness once, so come back for the rest."""
        if self._resume is not None or not self._sockets:
            return
        end = self._clock() + _AT_ONCE_S
        while self._take_one():
            if self._clock() >= end:
                self._resume = self._loop.call_later(_PAUSE_S, self._again)
                return

    def _again(self) -> None:
        self._resume = None
        self._read()

    def _take_one(self) -> bool:
        """Handle one message of the first socket that has one."""
        for socket in self._sockets:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                continue
            if socket is self._events:
                self.feed.message(frames)
            elif socket is self._replay:
                self.feed.replayed(frames)
            elif parse_monitor_message(frames)["event"] == _UP:
                self.feed.connected()
            else:
                self.feed.disconnected()
            return True
        return False


def _fd(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_MAX)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
