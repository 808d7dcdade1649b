"""Follows the events of all engines that publish them, as engines come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import zmq

from kvduplex_router.clock import Clock
from kvduplex_router.events.feed import FeedCounts
from kvduplex_router.events.index import BlockIndex
from kvduplex_router.events.subscriber import Subscriber
from kvduplex_router.events.trust import TrustKeeper

__all__ = ["Endpoints", "EventService"]

Endpoints = tuple[str, str | None, int | None]
"""``HOST:PORT`` of an engine's publisher and of its replays, and its data-parallel rank."""

_log = logging.getLogger("kvduplex.router.events")
_TICK_S: Final = 0.5
_BUSY_S: Final = 0.02
_TIDIED: Final = 5_000


class EventService:
    """See the module.

    Args:
        index: Where blocks are entered.
        trust: An engine's trust, by name.
        wanted: The engines that publish events, asked about twice a second.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        index: BlockIndex,
        *,
        trust: Callable[[str], TrustKeeper],
        wanted: Callable[[], Mapping[str, Endpoints]],
        clock: Clock,
    ) -> None:
        self._index = index
        self._trust = trust
        self._wanted = wanted
        self._clock = clock
        self._context: zmq.Context[Any] | None = None
        self._following: dict[str, Subscriber] = {}
        self.counts = FeedCounts()

    @property
    def following(self) -> Mapping[str, Subscriber]:
        """Subscribers by engine."""
        return self._following

    def distrust(self, engine: str) -> None:
        """An engine's events proved wrong: learn its blocks anew."""
        subscriber = self._following.get(engine)
        if subscriber is not None:
            subscriber.feed.distrusted()

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            while True:
                try:
                    self.reconcile()
                except Exception:  # noqa: BLE001 - a task boundary: one engine's address must not end the events of all
                    _log.exception("following engines' events failed; trying again")
                await asyncio.sleep(_BUSY_S if self._index.tidy(_TIDIED) else _TICK_S)
        finally:
            self.close()

    def reconcile(self) -> None:
        """Begin to follow engines that are new, and stop following those that are gone or moved."""
        wanted = self._wanted()
        for name in [n for n, s in self._following.items() if wanted.get(n) != s.endpoints]:
            self._following.pop(name).close()
            self._index.forget(name)
        for name, endpoints in wanted.items():
            subscriber = self._following.get(name)
            if subscriber is None:
                self._following[name] = self._subscriber(name, endpoints)
            else:
                subscriber.tick()

    def close(self) -> None:
        """Stop following."""
        for subscriber in self._following.values():
            subscriber.close()
        self._following.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _subscriber(self, name: str, endpoints: Endpoints) -> Subscriber:
        if self._context is None:
            self._context = zmq.Context()
        events, replay, rank = endpoints
        return Subscriber(
            name, events=events, replay=replay, rank=rank, index=self._index, trust=self._trust(name),
            clock=self._clock, context=self._context, counts=self.counts,
        )  # fmt: skip
