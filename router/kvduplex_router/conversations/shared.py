"""A ledger that several routers share, with this process's own one for when the shared server is gone.

A turn never waits for the server longer than one deadline, and not at all while it is known to be down. What a turn
leaves is kept in one place only: what might have reached the server is not kept here as well, for a reference is good
for one use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from kvduplex_router.clock import Clock
from kvduplex_router.conversations.leases import HeldLease
from kvduplex_router.conversations.ledger import LocalLedger, Taken
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.conversations.valkey import LeaseName, SharedStore, StateError, StateTimeout

__all__ = ["SharedLedger"]

_log = logging.getLogger("kvduplex.router.state")
_T = TypeVar("_T")
_Write = Callable[[], Awaitable[LeaseName | None]]
"""Stores a reference; returns the lease that is to be given back."""
_FAILURES: Final = 2
_BATCH: Final = 1000
_FLUSH_S: Final = 1.0


class SharedLedger:
    """A `kvduplex_router.conversations.ledger.Ledger` over a shared store.

    Args:
        store: The shared store.
        local: This process's own; it also speaks to the engines.
        clock: Monotonic seconds.
        timeout_s: Deadline of one operation.
        retry_s: Between attempts to reach a store that failed.
        where: The server's address for the log, without secrets.
    """

    def __init__(
        self,
        store: SharedStore,
        local: LocalLedger,
        *,
        clock: Clock,
        timeout_s: float,
        retry_s: float,
        where: str,
    ) -> None:
        self._store = store
        self._local = local
        self._clock = clock
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._where = where
        self._writing: dict[bytes, asyncio.Task[None]] = {}
        self._names: dict[str, LeaseName] = {}
        self._total: int | None = None
        self._errors_in_row = 0
        self._failures = 0
        self._down = asyncio.Event()
        self._said: str | None = None
        self.up = False

    async def take(self, keys: Sequence[bytes]) -> Taken | None:
        """See `Ledger.take`."""
        for key in keys:
            if (writing := self._writing.get(key)) is not None:
                await asyncio.wait([writing], timeout=self._timeout_s)
        own = self._local.take_now(keys)
        if own is not None or not self.up:
            return own
        found = await self._tried("take", self._store.take(keys))
        if found is None:
            return None
        reference = msgspec.structs.replace(found.reference, stored_at=self._clock() - found.age_s)
        return Taken(reference, self._local.fate(reference, lost=found.lost), keys[found.index])

    def put(self, key: bytes, reference: Reference, keep_s: float) -> None:
        """See `Ledger.put`."""
        if self.up:
            stamped = self._local.stamped(reference)
            self._start_write(key, reference, partial(self._store.put, key, stamped, keep_s))
        else:
            self._local.put(key, reference, keep_s)

    def put_back(self, key: bytes, reference: Reference, keep_s: float) -> None:
        """See `Ledger.put_back`."""
        if not self.up:
            self._local.put_back(key, reference, keep_s)
        elif key not in self._writing:
            age_s = self._clock() - reference.stored_at
            self._start_write(key, reference, partial(self._store.put_back, key, reference, keep_s, age_s))
        elif reference.lease is not None:  # a newer one is on its way
            self._local.release(reference.engine, reference.lease)

    def release(self, engine: str, lease: str) -> None:
        """See `Ledger.release`."""
        self._local.release(engine, lease)

    async def counts(self) -> Mapping[str, float]:
        """See `Ledger.counts`."""
        return self.counts_now()

    def counts_now(self) -> Mapping[str, float]:
        """`counts` without a wait."""
        shared = {"state_up": float(self.up), "state_failures": float(self._failures)}
        if self._total is not None:
            shared["shared_leases"] = float(self._total)
        return {**self._local.counts_now(), **shared}

    def set_endpoint(self, engine: str, endpoint: str | None) -> None:
        """See `LocalLedger.set_endpoint`."""
        self._local.set_endpoint(engine, endpoint)

    async def due(self) -> list[HeldLease]:
        """Leases that this router is to renew now, whoever made them."""
        found = await self._tried("renew", self._store.due(_BATCH)) if self.up else None
        self._total = None if found is None else found.total
        self._names = {} if found is None else {name.lease: name for name in found.leases}
        ends = ((name.lease, self._local.endpoint(name.engine)) for name in self._names.values())
        return [HeldLease(lease, endpoint) for lease, endpoint in ends if endpoint is not None]

    async def lost(self, leases: Sequence[str]) -> None:
        """Engines no longer hold these, of those that were `due`."""
        names = [self._names[lease] for lease in leases if lease in self._names]
        if names and self.up:
            await self._tried("lost", self._store.lost(names))

    async def run(self) -> None:
        """Watch over the store until cancelled; then finish what is being written, within a second."""
        try:
            while True:
                await self._reach()
                self._down.clear()
                await self._down.wait()
        finally:
            if self._writing:
                await asyncio.wait(list(self._writing.values()), timeout=_FLUSH_S)
            await self._store.close()

    async def _reach(self) -> None:
        """Return once the store answers."""
        began = self._clock()
        while True:
            try:
                async with asyncio.timeout(self._timeout_s * 2):
                    await self._store.ping()
            except StateError as error:
                self._say(error)
                await asyncio.sleep(self._retry_s)
                continue
            self.up = True
            self._errors_in_row = 0
            if self._said is not None:
                _log.warning("state at %s is back after %.1f s", self._where, self._clock() - began)
                self._said = None
            return

    async def _tried(self, what: str, operation: Awaitable[_T]) -> _T | None:
        """What `operation` returns; None when it fails or takes too long, which may put the store out of use."""
        try:
            return await self._within(operation)
        except StateError as error:
            self._failed(what, error)
            return None

    async def _within(self, operation: Awaitable[_T]) -> _T:
        async with asyncio.timeout(self._timeout_s):
            answer = await operation
        self._errors_in_row = 0
        return answer

    def _failed(self, what: str, error: BaseException) -> None:
        self._failures += 1
        self._errors_in_row += 1
        _log.debug("state: %s failed: %s", what, error)
        if self.up and (self._errors_in_row >= _FAILURES or not isinstance(error, StateTimeout)):
            self.up = False
            self._down.set()
            self._say(error)

    def _say(self, error: BaseException) -> None:
        """One line an outage."""
        if self._said is None:
            self._said = str(error) or f"no answer within {self._timeout_s:g} s"
            _log.warning(
                "state at %s cannot be used (%s): conversations are kept in this process until it is back; turns that "
                "reach another router recompute once",
                self._where,
                self._said,
            )

    def _start_write(self, key: bytes, reference: Reference, write: _Write) -> None:
        task = asyncio.create_task(self._write(reference, write))
        self._writing[key] = task
        task.add_done_callback(lambda _task: self._written(key, task))

    async def _write(self, reference: Reference, write: _Write) -> None:
        try:
            displaced = await self._within(write())
        except StateError as error:  # whether it was stored is not known, so nobody may count on it
            self._failed("put", error)
            displaced = None if reference.lease is None else LeaseName(reference.engine, reference.lease, b"")
        if displaced is not None:
            self._local.release(displaced.engine, displaced.lease)

    def _written(self, key: bytes, task: asyncio.Task[None]) -> None:
        if self._writing.get(key) is task:
            del self._writing[key]
