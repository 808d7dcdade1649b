"""References and the leases behind them, kept together: who takes one takes the other.

One ledger serves a router, however many processes it has; `kvduplex_router.workers` reaches it from others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from kvduplex_router.conversations.leases import HeldLease, LeaseKeeper
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.conversations.store import MemoryStore
from kvduplex_router.memory import trim_memory

__all__ = ["Fate", "Ledger", "LocalLedger", "OwnLedger", "Taken"]

_MANY: Final = 10_000
_SOME: Final = 1_000


class Fate(StrEnum):
    """What is known of a reference's lease; ``HELD`` also stands for a reference without one."""

    HELD = "held"
    LOST = "lost"
    RESTARTED = "restarted"


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """A reference that was taken, its lease's fate, and the key it was under."""

    reference: Reference
    fate: Fate
    key: bytes


class Ledger(Protocol):
    """References by conversation key."""

    async def take(self, keys: Sequence[bytes]) -> Taken | None:
        """Remove and return the reference of the first of `keys` that has one; of concurrent calls one gets it."""

    def put(self, key: bytes, reference: Reference, keep_s: float) -> None:
        """Store a reference, in the place of the key's former one, and renew its lease for `keep_s` seconds."""

    def put_back(self, key: bytes, reference: Reference, keep_s: float) -> None:
        """Store a reference again that was taken and not used.

        Where the key has a newer one by now, that stays, and the lease is given back.
        """

    def release(self, engine: str, lease: str) -> None:
        """Give a lease back to a decode engine."""

    async def counts(self) -> Mapping[str, float]:
        """What is held, by metric name."""


class OwnLedger(Ledger, Protocol):
    """A ledger kept by the process that asks, whose engines come and go."""

    def counts_now(self) -> Mapping[str, float]:
        """`counts` without a wait."""

    def set_endpoint(self, engine: str, endpoint: str | None) -> None:
        """An engine came with that lease endpoint, or left."""


class LocalLedger:
    """A ledger in this process.

    Args:
        store: References.
        keeper: Leases.
    """

    def __init__(self, *, store: MemoryStore, keeper: LeaseKeeper) -> None:
        self._store = store
        self._keeper = keeper
        self._endpoints: dict[str, str] = {}
        self._dropped = 0  # since memory was given back

    def endpoint(self, engine: str) -> str | None:
        """Lease endpoint of an engine."""
        return self._endpoints.get(engine)

    def set_endpoint(self, engine: str, endpoint: str | None) -> None:
        """An engine came with that lease endpoint, or left."""
        former = self._endpoints.pop(engine, None)
        if endpoint is not None:
            self._endpoints[engine] = endpoint
            self._keeper.open(endpoint)
        if former is not None and former not in self._endpoints.values():
            self._keeper.shut(former)

    async def take(self, keys: Sequence[bytes]) -> Taken | None:
        """See `Ledger.take`."""
        return self.take_now(keys)

    def take_now(self, keys: Sequence[bytes]) -> Taken | None:
        """`take` without a wait."""
        for key in keys:
            reference = self._store.take(key)
            if reference is not None:
                return Taken(reference, self.fate(reference), key)
        return None

    def put(self, key: bytes, reference: Reference, keep_s: float) -> None:
        """See `Ledger.put`."""
        self._put(key, self.stamped(reference), keep_s)

    def put_back(self, key: bytes, reference: Reference, keep_s: float) -> None:
        """See `Ledger.put_back`."""
        if self._store.holds(key):
            self._give_back(reference)
        else:
            self._put(key, reference, keep_s)

    def stamped(self, reference: Reference) -> Reference:
        """A leased reference with the identity its engine has now, by which a restart will be known."""
        endpoint = self._endpoints.get(reference.engine)
        if reference.lease is None or endpoint is None:
            return reference
        return msgspec.structs.replace(reference, identity=self._keeper.identity(endpoint))

    def release(self, engine: str, lease: str) -> None:
        """See `Ledger.release`."""
        if (endpoint := self._endpoints.get(engine)) is not None:
            self._keeper.release(lease, endpoint)

    async def counts(self) -> Mapping[str, float]:
        """See `Ledger.counts`."""
        return self.counts_now()

    def counts_now(self) -> Mapping[str, float]:
        """`counts` without a wait."""
        store = self._store
        return {"references": store.count, "reference_bytes": store.held_bytes, "leases_renewed": self._keeper.count}

    async def sweep_forever(self, interval_s: float = 5.0) -> None:
        """Drop what is too old, with or without traffic, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.sweep()

    def sweep(self) -> None:
        """Drop what is too old, and hand the memory of a large heap of it back to the system."""
        dropped = self._store.sweep()
        for reference in dropped:
            self._give_back(reference)
        self._dropped += len(dropped)
        if self._dropped > _MANY or (self._dropped > _SOME and not self._store.count):
            dropped.clear()
            self._dropped = 0
            trim_memory()

    def fate(self, reference: Reference, *, lost: bool = False) -> Fate:
        """What is known of a reference's lease now that the reference is taken; its renewal ends.

        Args:
            reference: What was taken.
            lost: Another router knows that the engine dropped it.
        """
        endpoint = self._endpoints.get(reference.engine)
        if reference.lease is None or endpoint is None:
            return Fate.HELD
        held = self._keeper.let_go(reference.lease)
        now = self._keeper.identity(endpoint)
        if None not in (reference.identity, now) and reference.identity != now:
            return Fate.RESTARTED
        return Fate.HELD if held and not lost else Fate.LOST

    def _put(self, key: bytes, reference: Reference, keep_s: float) -> None:
        endpoint = self._endpoints.get(reference.engine)
        if reference.lease is not None and endpoint is not None:
            self._keeper.hold(HeldLease(reference.lease, endpoint), keep_s)
        for displaced in self._store.put(key, reference):
            self._give_back(displaced)

    def _give_back(self, reference: Reference) -> None:
        if reference.lease is not None:
            self.release(reference.engine, reference.lease)
