"""The claimant: sends claims from a prefill engine's scheduler thread and never waits for an answer.

A scheduler asks once when a request arrives and looks for the answer when it would schedule it. All sockets belong to
that one thread; ZeroMQ's own threads do the network's work meanwhile.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import zmq

from kvduplex_transfer.leases import messages
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.curve import CurveClient
from kvduplex_transfer.leases.errors import MalformedFrameError
from kvduplex_transfer.leases.states import ClaimFailure

__all__ = ["Claimant", "PendingClaim"]

_QUEUED_FRAMES: Final = 64
_MAX_PEERS: Final = 128
_BATCH: Final = 256
_PATIENCE: Final = 3
_FIRST_BACKOFF_S: Final = 1.0
_LONGEST_BACKOFF_S: Final = 8.0


@dataclass(slots=True, eq=False)
class PendingClaim:
    """One claim from the moment it was sent. Read it; only its `Claimant` changes it.

    Attributes:
        endpoint: The decode engine asked.
        lease: Lease id.
        number: Its number on that connection.
        sent_at: When it was sent, on the claimant's clock; deadlines in `grant` count from here.
        grant: The decode engine's consent, once it came.
        refusal: Why there is none: a `RefusalReason` or `ClaimFailure` value.
        answered_at: When either came.
    """

    endpoint: str
    lease: str
    number: int
    sent_at: float
    grant: messages.Granted | None = None
    refusal: str | None = None
    answered_at: float | None = None

    @property
    def waiting(self) -> bool:
        """Whether neither consent nor refusal came yet."""
        return self.grant is None and self.refusal is None


@dataclass(slots=True, eq=False)
class _Peer:
    """A decode engine as the claimant knows it."""

    socket: zmq.Socket[bytes]
    waiting: dict[int, PendingClaim] = field(default_factory=dict)
    timeouts: int = 0
    asked_again_at: float = 0.0


class Claimant:
    """Claims leases of any number of decode engines. Not thread-safe: one thread makes every call.

    Args:
        fingerprint: What this engine can read; see `messages.Identity`.
        timeout_s: Seconds after which an unanswered claim counts as refused.
        clock: Monotonic seconds.
        curve: Keys, or None for open endpoints.
    """

    def __init__(
        self, *, fingerprint: bytes, timeout_s: float, clock: Callable[[], float], curve: CurveClient | None = None
    ) -> None:
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._clock = clock
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._numbers = 0
        self.dropped = 0
        """Replies that were malformed or that nobody waited for any more."""

    def claim(self, endpoint: str, lease: str, chain: HashChain) -> PendingClaim:
        """Ask `endpoint` for the blocks of `lease` that belong to `chain`. Returns at once."""
        self._numbers += 1
        now = self._clock()
        pending = PendingClaim(endpoint, lease, self._numbers, now)
        peer = self._peer(endpoint)
        chain = chain.prefix(messages.MAX_BLOCKS)
        request = messages.Claim(pending.number, lease, self._fingerprint, chain.hash_size, chain.packed)
        if now < peer.asked_again_at or not _send(peer, request):
            pending.refusal, pending.answered_at = ClaimFailure.UNREACHABLE, now
            return pending
        peer.waiting[pending.number] = pending
        if peer.timeouts >= _PATIENCE:  # one claim probes a silent peer; the others wait for its outcome
            peer.asked_again_at = now + self._backoff_s(peer)
        return pending

    def poll(self) -> None:
        """Take in the answers that have come, and give up on claims that waited too long."""
        now = self._clock()
        for endpoint, peer in list(self._peers.items()):
            self._receive(peer, now)
            overdue = [claim for claim in peer.waiting.values() if now - claim.sent_at >= self._timeout_s]
            for claim in overdue:
                self._give_up(peer, claim, now)
            if overdue and peer.timeouts == _PATIENCE and not peer.waiting:
                self._forget_queue(endpoint, peer, now)

    def finish(self, claim: PendingClaim, *, consumed: bool) -> None:
        """Close a granted claim. A lost message costs nothing but time: the claim lapses by itself."""
        peer = self._peers.get(claim.endpoint)
        if claim.grant is not None and peer is not None:
            _send(peer, messages.Finish(claim.number, consumed))

    def abandon(self, claim: PendingClaim) -> None:
        """Stop waiting for a claim's answer, or give back what it granted."""
        peer = self._peers.get(claim.endpoint)
        if peer is None:
            return
        if peer.waiting.pop(claim.number, None) is not None or claim.grant is not None:
            _send(peer, messages.Finish(claim.number, consumed=False))

    def close(self) -> None:
        """Close every connection; open claims lapse at their decode engines. Idempotent."""
        for peer in self._peers.values():
            self._drop_peer(peer)
        self._peers.clear()
        self._context.term()

    def _receive(self, peer: _Peer, now: float) -> None:
        for _ in range(_BATCH):
            try:
                frames = peer.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer.timeouts, peer.asked_again_at = 0, 0.0
            try:
                reply = messages.decode_reply(frames[0]) if len(frames) == 1 else None
            except MalformedFrameError:
                reply = None
            self._settle(peer, reply, now)

    def _settle(self, peer: _Peer, reply: messages.Reply | None, now: float) -> None:
        if not isinstance(reply, (messages.Granted, messages.Refused)):
            self.dropped += 1
            return
        claim = peer.waiting.pop(reply.number, None)
        if claim is None:  # it came after the claim was given up, and that was told to the peer
            self.dropped += 1
            return
        claim.answered_at = now
        if isinstance(reply, messages.Granted):
            claim.grant = reply
        else:
            claim.refusal = reply.reason

    def _give_up(self, peer: _Peer, claim: PendingClaim, now: float) -> None:
        peer.timeouts += 1
        claim.refusal, claim.answered_at = ClaimFailure.TIMEOUT, now
        del peer.waiting[claim.number]
        _send(peer, messages.Finish(claim.number, consumed=False))

    def _forget_queue(self, endpoint: str, peer: _Peer, now: float) -> None:
        """Drop what is queued for a silent peer: it would learn of claims long given up."""
        peer.socket.close(linger=0)
        peer.socket = self._connect(endpoint)
        peer.asked_again_at = now + self._backoff_s(peer)

    def _backoff_s(self, peer: _Peer) -> float:
        doublings = min(peer.timeouts - _PATIENCE, 8)
        return float(min(_FIRST_BACKOFF_S * 2**doublings, _LONGEST_BACKOFF_S))

    def _peer(self, endpoint: str) -> _Peer:
        peer = self._peers.get(endpoint)
        if peer is None:
            while len(self._peers) >= _MAX_PEERS:
                _, idle = self._peers.popitem(last=False)
                self._drop_peer(idle)
            peer = self._peers[endpoint] = _Peer(self._connect(endpoint))
        self._peers.move_to_end(endpoint)
        return peer

    def _drop_peer(self, peer: _Peer) -> None:
        """Close its connection; what waits for it waits no longer."""
        for claim in peer.waiting.values():
            claim.refusal, claim.answered_at = ClaimFailure.UNREACHABLE, self._clock()
        peer.waiting.clear()
        peer.socket.close(linger=0)

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.maxmsgsize = messages.MAX_FRAME_BYTES
        socket.sndhwm = socket.rcvhwm = _QUEUED_FRAMES
        socket.ipv6 = True
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        socket.heartbeat_ivl, socket.heartbeat_timeout = 2000, 6000
        socket.routing_id = b"c" + secrets.token_bytes(15)  # names this connection across reconnects
        if self._curve is not None:
            self._curve.apply(socket)
        socket.connect(endpoint)
        return socket


def _send(peer: _Peer, message: messages.Request) -> bool:
    try:
        peer.socket.send(messages.encode(message), zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True
