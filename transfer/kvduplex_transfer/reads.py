"""Reads in flight: what each one waits for, what it keeps busy, and when to look at it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvduplex_transfer.errors import PeerLostError, TransferError, TransferFailedError
from kvduplex_transfer.interface import TransferHandle, TransferState
from kvduplex_transfer.native import NativeRead
from kvduplex_transfer.peers import PeerRecord

__all__ = ["Read", "ReadHandle", "ReadTable"]

_EAGER_S = 200e-6  # most reads over shared memory or RDMA end sooner than a sleeping thread wakes up
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3
_LOOKS_PER_ELAPSED = 32


class Read:
    """One read, from its start until its last byte arrived or never will.

    Its outcome, seen by callers, may come before its end, seen by memory: a released read has failed for its
    caller, and still keeps its regions busy while the network goes on writing.
    """

    __slots__ = ("_event", "_settling", "error", "id", "native", "peer", "regions", "started", "state")

    def __init__(self, read_id: int, peer: PeerRecord, regions: frozenset[int], started: float) -> None:
        self.id = read_id
        self.peer = peer
        self.regions = regions
        self.started = started
        self.native: NativeRead | None = None
        self.state = TransferState.PENDING
        self.error: TransferError | None = None
        self._event: threading.Event | None = None  # made for the first that waits; most reads end before
        self._settling = threading.Lock()  # callers settle by releasing, the owner by looking

    def settle(self, error: TransferError | None) -> None:
        """Fix the outcome; the first one stays."""
        with self._settling:
            if self.state is not TransferState.PENDING:
                return
            # Without its traceback: whoever keeps a handle must not keep alive what the frames refer to.
            self.error = None if error is None else error.with_traceback(None)
            self.state = TransferState.DONE if error is None else TransferState.FAILED
            if self._event is not None:
                self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the outcome; False past the deadline."""
        with self._settling:
            if self.state is not TransferState.PENDING:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(timeout_s)


@dataclass(frozen=True, slots=True)
class ReadHandle(TransferHandle):
    """A handle that holds its read, so that no table has to remember released ones."""

    read: Read = field(repr=False, compare=False)
    incarnation: str = field(repr=False, compare=False)


class ReadTable:
    """Reads whose memory is still busy.

    Args:
        is_done: Asks NIXL; raises a `TransferError` when the read failed.
        release: Frees an ended read in NIXL.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        is_done: Callable[[NativeRead], bool],
        release: Callable[[NativeRead], None],
        clock: Callable[[], float],
    ) -> None:
        self._is_done = is_done
        self._release = release
        self._clock = clock
        self._active: dict[int, Read] = {}
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._active)

    def add(self, read: Read, native: NativeRead) -> None:
        """Follow a read that was posted and is not done."""
        read.native = native
        read.peer.in_flight += 1
        self._active[read.id] = read
        self._next_look = self._clock()

    def end(self, read: Read) -> None:
        """Close a read that is known to be done."""
        self._end(read)
        read.settle(None)

    def on(self, regions: Iterable[int]) -> list[Read]:
        """Reads that keep any of these regions busy."""
        wanted = frozenset(regions)
        return [read for read in self._active.values() if wanted & read.regions]

    def fail_peer(self, peer: PeerRecord, error: TransferError) -> None:
        """Fix the outcome of a peer's reads; they stay busy until they end."""
        for read in self._active.values():
            if read.peer is peer:
                read.settle(error)

    def look(self) -> float | None:
        """Ask NIXL about every read, when it is time to.

        Returns:
            Seconds until the next look is due; None when no read is in flight.
        """
        if not self._active:
            return None
        now = self._clock()
        if now >= self._next_look:
            for read in tuple(self._active.values()):
                self._look_at(read)
            self._next_look = now + self._pause(now)
        return max(0.0, self._next_look - now) if self._active else None

    def drop_all(self, error: TransferError) -> None:
        """Fix every outcome and free the handles, right before the agent is destroyed."""
        for read in tuple(self._active.values()):
            read.settle(error)
            self._end(read)

    def _look_at(self, read: Read) -> None:
        assert read.native is not None  # noqa: S101 - `add` set it
        try:
            if not self._is_done(read.native):
                return
            outcome: TransferError | None = None
        except TransferError as error:
            outcome = error
            read.peer.lost = read.peer.lost or isinstance(error, PeerLostError)
        self._end(read)
        read.settle(outcome)

    def _end(self, read: Read) -> None:
        native, read.native = read.native, None
        del self._active[read.id]
        read.peer.in_flight -= 1
        if native is not None:
            try:
                self._release(native)
            except TransferError as error:
                read.settle(TransferFailedError(f"read {read.id} could not be released: {error}"))

    def _pause(self, now: float) -> float:
        """None at first, then a few per cent of the age of the youngest read: prompt for short ones, cheap for long."""
        age = now - max((read.started for read in self._active.values()), default=now)
        return 0.0 if age < _EAGER_S else min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, age / _LOOKS_PER_ELAPSED))
