"""The lease endpoint of a decode engine: one thread that answers claims and renewals over ZeroMQ.

The thread owns the socket and touches the engine through nothing but the lease table, so a claim is answered while the
engine computes. No lock is held while anything is sent or received. Memory is bounded: frames, queues and the table
have limits, and what exceeds them is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import zmq

from kvduplex_transfer.leases import messages
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.curve import CurveServer
from kvduplex_transfer.leases.errors import InvalidLeaseError, LeaseConfigError, MalformedFrameError
from kvduplex_transfer.leases.records import ClaimKey, Grant
from kvduplex_transfer.leases.states import RefusalReason
from kvduplex_transfer.leases.table import LeaseTable

__all__ = ["LeaseServer"]

_log = logging.getLogger(__name__)

_QUEUED_REQUESTS: Final = 32
_QUEUED_REPLIES: Final = 1024
_BATCH: Final = 256
_LONGEST_WAIT_S: Final = 0.5
_ANNOUNCE_EVERY_S: Final = 0.1
_FRAMES_PER_MESSAGE: Final = 2
_DROPS: Final = ("magic", "version", "content", "frames", "unsent")


class LeaseServer:
    """Answers for one lease table. `start` binds, `close` ends the thread; both are idempotent.

    Args:
        table: The leases.
        identity: Who answers, for `messages.Hello`; called on the server's thread.
        source: Where granted blocks are read, or None while the engine cannot be read yet.
        host: Address to bind (IPv6 in brackets), or ``*`` for all.
        port: Port to bind; 0 takes a free one, see `endpoint`.
        on_loose: Called on the server's thread when blocks wait to be given back to the engine.
        curve: Keys, or None for an open endpoint.
    """

    def __init__(
        self,
        *,
        table: LeaseTable,
        identity: Callable[[int], messages.Identity],
        source: Callable[[], messages.Source | None],
        host: str,
        port: int,
        on_loose: Callable[[], None] = lambda: None,
        curve: CurveServer | None = None,
    ) -> None:
        self._table = table
        self._identity = identity
        self._source = source
        self._bind_to = f"tcp://{host}:{port or '*'}"
        self._ipv6 = host == "*" or ":" in host
        self._on_loose = on_loose
        self._curve = curve
        self._fingerprint = identity(0).fingerprint
        self._bell: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        # Every key from the start: another thread copies these while they count.
        self._dropped: Counter[str] = Counter(dict.fromkeys(_DROPS, 0))
        self._refused: Counter[str] = Counter(dict.fromkeys((RefusalReason.INCOMPATIBLE, RefusalReason.MISMATCH), 0))
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """``tcp://HOST:PORT`` it is bound to; empty before `start`."""
        return self._endpoint

    def dropped(self) -> Counter[str]:
        """Messages dropped so far, by reason: ``magic``, ``version``, ``content``, ``frames``, ``unsent``."""
        return +Counter(self._dropped)

    def refused(self) -> Counter[str]:
        """Claims refused before they came to the table, by reason; to be added to the table's own."""
        return +Counter(self._refused)

    def start(self) -> None:
        """Bind and answer from now on.

        Raises:
            LeaseConfigError: The address cannot be bound, or a key file is wrong.
        """
        if self._thread is not None:
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        socket = context.socket(zmq.ROUTER)
        authenticator = None
        try:
            _bound_memory(socket)
            socket.ipv6 = self._ipv6
            authenticator = self._curve.apply(socket, context) if self._curve else None
            socket.bind(self._bind_to)
        except (zmq.ZMQError, LeaseConfigError) as error:
            if authenticator is not None:
                authenticator.stop()
            context.destroy(linger=0)
            if isinstance(error, LeaseConfigError):
                raise
            raise LeaseConfigError(
                f"lease endpoint {self._bind_to} cannot be bound: {error}; set lease_host and lease_port to a free "
                "address of this host"
            ) from error
        self._endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        stop, self._bell = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        stop.bind("inproc://stop")
        self._bell.connect("inproc://stop")

        def serve() -> None:
            try:
                self._serve(socket, stop)
            finally:
                if authenticator is not None:
                    authenticator.stop()
                context.destroy(linger=0)

        self._thread = threading.Thread(target=serve, name="kvduplex-leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and free the port; waits at most two seconds."""
        if self._thread is None or self._bell is None:
            return
        self._bell.send(b"")
        self._bell.close()
        self._thread.join(timeout=2.0)
        self._thread = self._bell = None

    def _serve(self, socket: zmq.Socket[bytes], stop: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        announce_at = 0.0
        while True:
            wait_s = min(self._table.seconds_to_next_end(), _LONGEST_WAIT_S)
            ready = dict(poller.poll(int(wait_s * 1000) + 1))
            if stop in ready:
                return
            if socket in ready:
                self._drain(socket)
            self._table.sweep()
            if self._table.any_loose and time.monotonic() >= announce_at:
                announce_at = time.monotonic() + _ANNOUNCE_EVERY_S  # a busy engine comes by without being called
                self._on_loose()

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != _FRAMES_PER_MESSAGE:
                self._dropped["frames"] += 1
                continue
            try:
                request = messages.decode_request(frames[1])
            except MalformedFrameError as error:
                self._drop(error)
                continue
            self._answer(socket, frames[0], request)

    def _drop(self, error: MalformedFrameError) -> None:
        self._dropped[error.reason] += 1
        if self._dropped[error.reason] == 1:
            _log.warning("Lease endpoint %s dropped a malformed message (%s); counting others", self._endpoint, error)

    def _answer(self, socket: zmq.Socket[bytes], peer: bytes, request: messages.Request) -> None:
        reply = self._reply(peer, request)
        if reply is None:
            return
        try:
            socket.send_multipart((peer, messages.encode(reply)), zmq.NOBLOCK)
        except zmq.ZMQError:  # the peer is gone or does not read: it will never know of a grant
            self._dropped["unsent"] += 1
            if isinstance(reply, messages.Granted):
                self._table.finish((peer, reply.number), consumed=False)

    def _reply(self, peer: bytes, request: messages.Request) -> messages.Reply | None:
        match request:
            case messages.Claim():
                return self._claim((peer, request.number), request)
            case messages.Finish():
                self._table.finish((peer, request.number), consumed=request.consumed)
                return None
            case messages.Renew():
                return messages.Renewed(request.nonce, self._table.renew(request.leases, request.ttl_s))
            case messages.Release():
                return messages.Released(request.nonce, self._table.release(request.leases))
            case messages.Hello():
                return self._identity(request.nonce)

    def _claim(self, key: ClaimKey, request: messages.Claim) -> messages.Granted | messages.Refused:
        source = self._source()
        if source is None or request.fingerprint != self._fingerprint:
            self._refused[RefusalReason.INCOMPATIBLE] += 1
            return messages.Refused(request.number, RefusalReason.INCOMPATIBLE)
        try:
            chain = HashChain(request.chain, request.hash_size)
        except InvalidLeaseError:
            self._refused[RefusalReason.MISMATCH] += 1
            return messages.Refused(request.number, RefusalReason.MISMATCH)
        answer = self._table.claim(key, request.lease, chain)
        if not isinstance(answer, Grant):
            return messages.Refused(request.number, answer)
        return messages.Granted(request.number, list(answer.blocks), answer.lease_blocks, answer.ttl_s, source)


def _bound_memory(socket: zmq.Socket[bytes]) -> None:
    """Let no peer make this process hold more than a few of the longest frames for it."""
    socket.linger = 0
    socket.maxmsgsize = messages.MAX_FRAME_BYTES
    socket.rcvhwm = _QUEUED_REQUESTS
    socket.sndhwm = _QUEUED_REPLIES
    socket.router_mandatory = True
    # A peer that returns before its old connection was seen to end takes its name over; else it is never heard again.
    socket.router_handover = True
    socket.heartbeat_ivl = 2000
    socket.heartbeat_timeout = 6000
    socket.heartbeat_ttl = 6000
