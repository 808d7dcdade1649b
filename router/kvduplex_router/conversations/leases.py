"""Keeps leases alive while their conversations are likely to return, and gives them back when they are not.

The decode engines hold the truth; everything here is best effort, in batches, and never delays a turn. A renewal that
is lost costs one recomputation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from kvduplex_router.clock import Clock

__all__ = ["HeldLease", "LeaseKeeper", "LeaseService", "OtherLeases"]

_log = logging.getLogger("kvduplex.router.leases")
_RENEWALS_PER_TTL: Final = 3
_LOST_KEPT: Final = 65_536
_BATCH: Final = 1024  # so that the answers to tens of thousands of renewals are never in memory together
_GOODBYE_S: Final = 1.0


class EngineIdentity(Protocol):
    """What an endpoint says about itself."""

    @property
    def engine_id(self) -> str:
        """Fresh for each start of the engine."""


class LeaseService(Protocol):
    """A decode engine's lease endpoint; `kvduplex_transfer.leases.client.AsyncLeaseClient` is one."""

    async def hello(self) -> EngineIdentity:
        """Who answers."""

    async def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> frozenset[str]:
        """Extend leases; returns those still alive."""

    async def release(self, lease_ids: Iterable[str]) -> frozenset[str]:
        """Give leases back."""

    async def close(self) -> None:
        """Close the connection."""


class HeldLease(msgspec.Struct, frozen=True):
    """A lease to keep.

    Attributes:
        id: Lease id.
        endpoint: The engine's ``tcp://HOST:PORT``.
    """

    id: str
    endpoint: str


class OtherLeases(Protocol):
    """Leases that several routers keep together."""

    async def due(self) -> Sequence[HeldLease]:
        """Those that this router is to renew now."""

    async def lost(self, leases: Sequence[str]) -> None:
        """Their engines no longer hold these of them."""


class LeaseKeeper:
    """Renews and releases leases, with one service per endpoint.

    Args:
        ttl_s: Seconds a lease lives from a renewal.
        clock: Monotonic seconds.
        connect: Opens an endpoint.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        clock: Clock,
        connect: Callable[[str], LeaseService],
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._connect = connect
        self._services: dict[str, LeaseService] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._others: OtherLeases | None = None
        self._period_s = ttl_s / _RENEWALS_PER_TTL
        self._identities: dict[str, str] = {}
        self._held: dict[str, tuple[HeldLease, float]] = {}
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._released: dict[str, list[str]] = defaultdict(list)
        self._wake = asyncio.Event()

    @property
    def count(self) -> int:
        """Leases being renewed."""
        return len(self._held)

    def also_renew(self, others: OtherLeases) -> None:
        """Renew those too; asked for twice as often as they fall due, so that none waits a whole period more."""
        self._others = others
        self._period_s /= 2

    def open(self, endpoint: str) -> None:
        """An engine joined the fleet."""
        if endpoint not in self._services:
            self._services[endpoint] = self._connect(endpoint)

    def shut(self, endpoint: str) -> None:
        """An engine left the fleet: what it held is its own affair now."""
        service = self._services.pop(endpoint, None)
        self._identities.pop(endpoint, None)
        self._released.pop(endpoint, None)
        for lease_id in [each for each, (lease, _) in self._held.items() if lease.endpoint == endpoint]:
            del self._held[lease_id]
        if service is not None:
            task = asyncio.get_running_loop().create_task(service.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def identity(self, endpoint: str) -> str | None:
        """Who answers at an endpoint, as it last said; another than before means that its former leases are gone."""
        return self._identities.get(endpoint)

    def hold(self, lease: HeldLease, keep_s: float) -> None:
        """Renew `lease` for `keep_s` seconds."""
        self._held[lease.id] = (lease, self._clock() + keep_s)

    def let_go(self, lease_id: str) -> bool:
        """Stop renewing, for the lease is taken for a claim; False when its engine is known to have dropped it."""
        self._held.pop(lease_id, None)
        lost = lease_id in self._lost
        self._lost.pop(lease_id, None)
        return not lost

    def release(self, lease_id: str, endpoint: str) -> None:
        """Stop renewing and give the lease back soon."""
        self._held.pop(lease_id, None)
        self._lost.pop(lease_id, None)
        self._released[endpoint].append(lease_id)
        self._wake.set()

    async def run(self) -> None:
        """Renew and release until cancelled; then give everything back, within a second."""
        try:
            while True:
                await self.renew_all()
                await self._release_until(self._clock() + self._period_s)
        finally:
            await self._goodbye()

    async def renew_all(self) -> None:
        """Renew what is due, all endpoints at once."""
        due: dict[str, list[str]] = {endpoint: [] for endpoint in self._services}
        now = self._clock()
        for lease, until in list(self._held.values()):
            if until <= now:
                del self._held[lease.id]
            elif lease.endpoint in due:
                due[lease.endpoint].append(lease.id)
        # Emptied ones keep the room of their largest day.
        self._held = self._held or {}
        self._lost = self._lost or OrderedDict()
        if self._others is not None:
            for lease in await self._others.due():
                due.setdefault(lease.endpoint, []).append(lease.id)
        await asyncio.gather(*(self._renew(endpoint, ids) for endpoint, ids in due.items()))

    async def release_all(self) -> None:
        """Give back what was released."""
        released, self._released = self._released, defaultdict(list)
        await asyncio.gather(*(self._release(endpoint, ids) for endpoint, ids in released.items()))

    async def _release_until(self, end: float) -> None:
        while (left := end - self._clock()) > 0:
            self._wake.clear()
            await self.release_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()

    async def _renew(self, endpoint: str, ids: list[str]) -> None:
        service = self._services.get(endpoint)
        if service is None:  # its engine left the fleet a moment ago
            return
        try:
            self._identities[endpoint] = (await service.hello()).engine_id
            for start in range(0, len(ids), _BATCH):
                batch = ids[start : start + _BATCH]
                await self._lost_of(batch, await service.renew(batch, self._ttl_s))
        except Exception as error:  # noqa: BLE001 - a task boundary; the engine's own table stays the truth
            _log.warning("renewing %d leases at %s failed: %s", len(ids), endpoint, error)

    async def _lost_of(self, ids: list[str], alive: frozenset[str]) -> None:
        gone = [lease_id for lease_id in ids if lease_id not in alive]
        for lease_id in gone:
            if self._held.pop(lease_id, None) is not None:
                self._lose(lease_id)
        if gone and self._others is not None:
            await self._others.lost(gone)

    async def _release(self, endpoint: str, ids: list[str]) -> None:
        service = self._services.get(endpoint)
        if service is None:
            return
        try:
            await service.release(ids)
        except Exception as error:  # noqa: BLE001 - a task boundary; leases end by themselves
            _log.warning("releasing %d leases at %s failed: %s", len(ids), endpoint, error)

    def _lose(self, lease_id: str) -> None:
        self._lost[lease_id] = None
        if len(self._lost) > _LOST_KEPT:
            self._lost.popitem(last=False)

    async def _goodbye(self) -> None:
        for lease, _ in self._held.values():
            self._released[lease.endpoint].append(lease.id)
        self._held.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self.release_all()
        for service in self._services.values():
            await service.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
