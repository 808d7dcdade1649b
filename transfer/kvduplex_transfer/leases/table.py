"""The lease table of one decode engine: who holds what, who reads it, and until when.

Pure: no I/O, no threads of its own, no engine. Time comes from the clock it is given, so wall-clock steps mean nothing
to it. Every method takes the one lock for as long as it computes and never while anything waits.

Blocks are pinned when `LeaseTable.hold` returns them and must be given back to the engine when `LeaseTable.take_loose`
returns them; between the two no other request may get them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.deadlines import Deadlines
from kvduplex_transfer.leases.errors import InvalidLeaseError
from kvduplex_transfer.leases.params import check_ttl_s
from kvduplex_transfer.leases.pins import PinCounts
from kvduplex_transfer.leases.records import (
    Claim,
    ClaimKey,
    Grant,
    Held,
    Lease,
    LeaseCounts,
    LeaseLimits,
    LeaseSnapshot,
)
from kvduplex_transfer.leases.states import ClaimEnd, LeaseState, RefusalReason

__all__ = ["LeaseTable"]

_REASONS = {
    LeaseState.CONSUMED: RefusalReason.CONSUMED,
    LeaseState.EXPIRED: RefusalReason.EXPIRED,
    LeaseState.RECLAIMED: RefusalReason.RECLAIMED,
    LeaseState.RELEASED: RefusalReason.RELEASED,
}


class LeaseTable:
    """Leases and claims of one engine. Every method may be called from any thread.

    Args:
        limits: Bounds it keeps.
        clock: Monotonic seconds.
    """

    def __init__(self, *, limits: LeaseLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: OrderedDict[str, Lease] = OrderedDict()  # least recently renewed first
        self._claims: dict[ClaimKey, Claim] = {}
        self._ended: OrderedDict[str, LeaseState] = OrderedDict()
        self._pins = PinCounts()
        self._counts = LeaseCounts()
        self._due: Deadlines[Lease | Claim] = Deadlines(self._may_end)

    @property
    def limits(self) -> LeaseLimits:
        """Bounds it keeps."""
        return self._limits

    def hold(self, lease_id: str, chain: HashChain, blocks: Sequence[int], ttl_s: float | None = None) -> Held:
        """Begin a lease on `blocks`.

        A lease alive under the same id is released first. Over the budget, expired and then least recently renewed
        leases give way; what still does not fit is cut off the end. Nothing is held when no block fits.

        Args:
            lease_id: A valid lease id.
            chain: Hashes of the blocks, one each.
            blocks: Their ids, without repeats.
            ttl_s: Seconds until it ends unless renewed; None for the longest time allowed.

        Raises:
            InvalidLeaseError: `chain` and `blocks` differ in length, or `ttl_s` is out of range.
        """
        if len(chain) != len(blocks):
            raise InvalidLeaseError(f"lease of {len(blocks)} blocks with {len(chain)} hashes: expected one hash each")
        ttl_s = self._limits.max_ttl_s if ttl_s is None else min(check_ttl_s(ttl_s), self._limits.max_ttl_s)
        with self._lock:
            now = self._sweep()
            if previous := self._leases.get(lease_id):
                self._end(previous, LeaseState.RELEASED)
            length = self._make_room(blocks)
            if not length:
                self._counts.denied += 1
                return Held(0, ())
            self._counts.held += 1
            self._counts.trimmed += length < len(blocks)
            lease = Lease(
                id=lease_id,
                chain=chain.prefix(length),
                blocks=tuple(blocks[:length]),
                expires=now + ttl_s,
                limit=now + self._limits.max_ttl_s,
            )
            self._ended.pop(lease_id, None)
            self._leases[lease_id] = lease
            self._due.enter(lease.expires, lease)
            return Held(length, self._pins.pin(lease.blocks))

    def claim(self, key: ClaimKey, lease_id: str, chain: HashChain) -> Grant | RefusalReason:
        """Open a claim on the blocks that `chain` proves to belong to the claimant's prompt.

        Several claims may be open on one lease: reading does not change the blocks. The lease ends when the first of
        them consumes it; its blocks stay until the last is done.
        """
        with self._lock:
            now = self._sweep()
            answer = self._grant(key, lease_id, chain, now)
            if isinstance(answer, RefusalReason):
                self._counts.refused[answer] += 1
            return answer

    def finish(self, key: ClaimKey, *, consumed: bool) -> bool:
        """Close a claim: `consumed` when the reader has every block. False when no such claim is open."""
        with self._lock:
            self._sweep()
            claim = self._claims.get(key)
            if claim is None:
                return False
            self._close(claim, ClaimEnd.CONSUMED if consumed else ClaimEnd.RETURNED)
            return True

    def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> list[str]:
        """Let leases live `ttl_s` seconds from now, within their longest time; returns the ids of those alive.

        Raises:
            InvalidLeaseError: `ttl_s` is out of range.
        """
        ttl_s = self._limits.lease_ttl_s if ttl_s is None else check_ttl_s(ttl_s)
        with self._lock:
            now = self._sweep()
            alive = [lease for lease_id in lease_ids if (lease := self._leases.get(lease_id))]
            for lease in alive:
                expires = min(now + ttl_s, lease.limit)
                if expires < lease.expires:
                    self._due.enter(expires, lease)
                lease.expires = expires
                self._leases.move_to_end(lease.id)
            self._counts.renewed += len(alive)
            return [lease.id for lease in alive]

    def release(self, lease_ids: Iterable[str]) -> list[str]:
        """End leases; returns the ids of those that were alive. Open claims still read to their end."""
        with self._lock:
            self._sweep()
            alive = [lease for lease_id in dict.fromkeys(lease_ids) if (lease := self._leases.get(lease_id))]
            for lease in alive:
                self._end(lease, LeaseState.RELEASED)
            return [lease.id for lease in alive]

    def reclaim(self, blocks: int) -> int:
        """End held leases, least recently renewed first, until `blocks` came loose; returns how many did.

        Claimed leases are never touched, so fewer may come loose than asked for.
        """
        with self._lock:
            self._sweep()
            return self._give_way(blocks)

    def drop_held(self) -> None:
        """Reclaim every lease without a claim, and end the claimed ones when their claims end."""
        with self._lock:
            for lease in list(self._leases.values()):
                self._end(lease, LeaseState.RECLAIMED)

    def sweep(self) -> None:
        """End what is overdue. Every other method does it too; call this when nothing else does."""
        with self._lock:
            self._sweep()

    def take_loose(self) -> list[int]:
        """Blocks to give back to the engine now, in that order. Call it from the engine's scheduler thread."""
        with self._lock:
            self._sweep()
            return self._pins.take_loose()

    @property
    def any_loose(self) -> bool:
        """Whether `take_loose` would return something at once. Takes no lock."""
        return self._pins.any_loose

    @property
    def blocks_pinned(self) -> int:
        """Blocks pinned now, each counted once."""
        return len(self._pins)

    def seconds_to_next_end(self) -> float:
        """Seconds until something may fall due: infinite when nothing is alive, 0 when it is overdue."""
        with self._lock:
            return max(0.0, self._due.next - self._clock())

    def counts(self) -> LeaseCounts:
        """A copy of the event counts."""
        with self._lock:
            return self._counts.copy()

    def snapshot(self) -> LeaseSnapshot:
        """The table now, after ending what is overdue."""
        with self._lock:
            self._sweep()
            claimed = len({claim.lease for claim in self._claims.values() if claim.lease.ended is None})
            return LeaseSnapshot(
                held=len(self._leases) - claimed,
                claimed=claimed,
                claims=len(self._claims),
                blocks_pinned=len(self._pins),
                budget_blocks=self._limits.budget_blocks,
            )

    def _grant(self, key: ClaimKey, lease_id: str, chain: HashChain, now: float) -> Grant | RefusalReason:
        lease = self._leases.get(lease_id)
        if lease is None:
            ended = self._ended.get(lease_id)
            return RefusalReason.UNKNOWN if ended is None else _REASONS[ended]
        if key in self._claims or len(self._claims) >= self._limits.max_claims:
            return RefusalReason.BUSY
        length = lease.chain.common_length(chain)
        if not length:
            return RefusalReason.MISMATCH
        claim = Claim(key, lease, now + self._limits.claim_ttl_s)
        self._claims[key] = claim
        lease.claims.add(key)
        self._due.enter(claim.deadline, claim)
        self._counts.claimed += 1
        return Grant(lease.blocks[:length], len(lease.blocks), self._limits.claim_ttl_s)

    def _close(self, claim: Claim, end: ClaimEnd) -> None:
        del self._claims[claim.key]
        lease = claim.lease
        lease.claims.discard(claim.key)
        self._counts.claim_ends[end] += 1
        if end is ClaimEnd.CONSUMED and lease.ended is None:
            self._end(lease, LeaseState.CONSUMED)
        elif lease.ended is None:
            self._due.enter(lease.expires, lease)
        elif not lease.claims:
            self._pins.unpin(lease.blocks)

    def _end(self, lease: Lease, state: LeaseState) -> None:
        """Take no more claims; give the blocks up now, or with the last open claim."""
        lease.ended = state
        del self._leases[lease.id]
        self._counts.ends[state] += 1
        self._ended[lease.id] = state
        while len(self._ended) > self._limits.max_ended:
            self._ended.popitem(last=False)
        if not lease.claims:
            self._pins.unpin(lease.blocks)

    def _make_room(self, blocks: Sequence[int]) -> int:
        """How many of `blocks`, from the first, may be pinned after others gave way."""
        while len(self._leases) >= self._limits.max_leases and (lease := self._oldest_held()):
            self._end(lease, LeaseState.RECLAIMED)
        if len(self._leases) >= self._limits.max_leases:
            return 0
        wanted = blocks[: self._limits.budget_blocks]
        while (short := self._pins.missing(wanted) - self._room) > 0 and self._give_way(short):
            pass  # what gave way may have been shared with `wanted`, so count again
        return self._pins.fitting(wanted, self._room)

    def _give_way(self, blocks: int) -> int:
        """End held leases, least recently renewed first, until `blocks` came loose; returns how many did."""
        before = len(self._pins)
        while before - len(self._pins) < blocks and (lease := self._oldest_held()):
            self._end(lease, LeaseState.RECLAIMED)
        return before - len(self._pins)

    @property
    def _room(self) -> int:
        return self._limits.budget_blocks - len(self._pins)

    def _oldest_held(self) -> Lease | None:
        return next((lease for lease in self._leases.values() if not lease.claims), None)

    def _sweep(self) -> float:
        """End overdue claims, then overdue leases; returns the time now."""
        now = self._clock()
        while (item := self._due.take(now)) is not None:
            if not self._may_end(item):
                continue
            if isinstance(item, Claim):
                self._close(item, ClaimEnd.LAPSED)
            elif item.expires <= now:
                self._end(item, LeaseState.EXPIRED)
            else:
                self._due.enter(item.expires, item)
        self._due.trim(len(self._leases) + len(self._claims))
        return now

    def _may_end(self, item: Lease | Claim) -> bool:
        """Whether the end of `item` is still to come. A claimed lease has none: its claims have."""
        if isinstance(item, Claim):
            return self._claims.get(item.key) is item
        return item.ended is None and not item.claims
