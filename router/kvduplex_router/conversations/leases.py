"""Keeps leases alive while their conversations are likely to return, and gives them back when they are not.

The decode engines hold the truth; everything here is best effort, in batches, and never delays a turn. A renewal that
is lost costs one recomputation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvduplex_router.clock import Clock

__all__ = ["HeldLease", "LeaseKeeper", "LeaseService"]

_log = logging.getLogger("kvduplex.router.leases")
_BATCH = 512
_RENEWALS_PER_TTL = 3


class LeaseService(Protocol):
    """A decode engine's lease endpoint."""

    async def renew(self, ids: Sequence[str], ttl_s: float) -> object:
        """Extend leases to `ttl_s` seconds from now; ids it does not know are ignored."""

    async def release(self, ids: Sequence[str]) -> object:
        """Give leases back; ids it does not know are ignored."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease to keep.

    Attributes:
        id: Lease id.
        endpoint: The engine's ``tcp://HOST:PORT``.
        until: Monotonic seconds after which it is no longer renewed.
    """

    id: str
    endpoint: str
    until: float


class LeaseKeeper:
    """Renews and releases through one service per endpoint, opened when first needed."""

    def __init__(self, *, ttl_s: float, clock: Clock, connect: Callable[[str], LeaseService]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._connect = connect
        self._services: dict[str, LeaseService] = {}
        self._held: dict[str, HeldLease] = {}
        self._released: dict[str, list[str]] = defaultdict(list)
        self._wake = asyncio.Event()

    @property
    def count(self) -> int:
        """Leases being renewed."""
        return len(self._held)

    def hold(self, lease: HeldLease) -> None:
        """Renew `lease` from now on."""
        self._held[lease.id] = lease

    def let_go(self, lease_id: str) -> None:
        """Stop renewing: the lease was taken for a claim."""
        self._held.pop(lease_id, None)

    def release(self, lease_id: str, endpoint: str) -> None:
        """Stop renewing and give the lease back soon."""
        self._held.pop(lease_id, None)
        self._released[endpoint].append(lease_id)
        self._wake.set()

    async def run(self) -> None:
        """Renew and release until cancelled."""
        while True:
            await self.step()
            self._wake.clear()
            try:
                async with asyncio.timeout(self._ttl_s / _RENEWALS_PER_TTL):
                    while True:
                        await self._wake.wait()
                        self._wake.clear()
                        await self._release_all()
            except TimeoutError:
                continue

    async def step(self) -> None:
        """Send what is due once."""
        await self._release_all()
        await self._renew_all()

    async def _release_all(self) -> None:
        released, self._released = self._released, defaultdict(list)
        for endpoint, ids in released.items():
            for start in range(0, len(ids), _BATCH):
                await self._call(endpoint, "release", ids[start : start + _BATCH])

    async def _renew_all(self) -> None:
        now = self._clock()
        due: dict[str, list[str]] = defaultdict(list)
        for lease in list(self._held.values()):
            if lease.until <= now:
                del self._held[lease.id]
            else:
                due[lease.endpoint].append(lease.id)
        for endpoint, ids in due.items():
            for start in range(0, len(ids), _BATCH):
                await self._call(endpoint, "renew", ids[start : start + _BATCH])

    async def _call(self, endpoint: str, what: str, ids: list[str]) -> None:
        service = self._services.get(endpoint)
        if service is None:
            service = self._services[endpoint] = self._connect(endpoint)
        try:
            await (service.renew(ids, self._ttl_s) if what == "renew" else service.release(ids))
        except Exception as error:  # noqa: BLE001 - a task boundary; the engine's table stays the truth
            _log.warning("lease %s of %d ids at %s failed: %s", what, len(ids), endpoint, error)
