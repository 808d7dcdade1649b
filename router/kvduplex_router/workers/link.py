"""A worker's connection to the hub: its ledger, and its view of the whole router."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvduplex_router.api.view import Tellers, Topic
from kvduplex_router.conversations.ledger import Taken
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.members import Member, Roster
from kvduplex_router.workers.channel import Channel
from kvduplex_router.workers.messages import (
    Admit,
    Collect,
    Collected,
    Dismiss,
    Done,
    Drain,
    Enrol,
    FromHub,
    FromWorker,
    Put,
    PutBack,
    Release,
    Scrape,
    Scraped,
    Take,
    Took,
    decode_from_hub,
)

__all__ = ["HubLink"]

_TAKE_S: Final = 1.0
_COLLECT_S: Final = 5.0


class HubLink:
    """A `kvduplex_router.conversations.ledger.Ledger` and a `kvduplex_router.api.view.FleetView` kept by the hub.

    A hub that does not answer costs a turn its reuse, never the turn.
    """

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self.tellers: Tellers = {}
        self.on_drain: Callable[[str, bool], None] = lambda _engine, _draining: None
        self._on_roster: Callable[[Roster], None] | None = None
        self._roster: Roster | None = None

    async def run(self, path: Path, connected: asyncio.Event) -> None:
        """Connect and read until the hub is gone; `connected` is set once it has said who belongs to the fleet."""
        gone = asyncio.Event()

        def hear(_channel: Channel, body: bytes) -> None:
            self._handle(decode_from_hub(body))
            if self._roster is not None:
                connected.set()

        def lose(_channel: Channel) -> None:
            gone.set()

        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: Channel(on_made=self._open, on_body=hear, on_lost=lose), str(path)
        )
        try:
            await gone.wait()
        finally:
            self._channel = None
            for number in self._waiting:
                self._answer(number, None)
            channel.close()

    def _open(self, channel: Channel) -> None:
        self._channel = channel

    async def take(self, keys: Sequence[bytes]) -> Taken | None:
        """See `Ledger.take`."""
        number = next(self._numbers)
        taken: Taken | None = await self._ask(Take(number, list(keys)), number, _TAKE_S)
        return taken

    def put(self, key: bytes, reference: Reference, keep_s: float) -> None:
        """See `Ledger.put`."""
        self._send(Put(key, reference, keep_s))

    def put_back(self, key: bytes, reference: Reference, keep_s: float) -> None:
        """See `Ledger.put_back`."""
        self._send(PutBack(key, reference, keep_s))

    def release(self, engine: str, lease: str) -> None:
        """See `Ledger.release`."""
        self._send(Release(engine, lease))

    async def counts(self) -> Mapping[str, float]:
        """See `Ledger.counts`; the hub adds them to the metrics itself."""
        return {}

    async def metrics(self) -> bytes:
        """See `FleetView.metrics`; this worker's alone when the hub does not answer."""
        (text,) = await self.told(Topic.METRICS)
        return text

    async def told(self, topic: Topic, *, most: int = 0) -> list[bytes]:
        """See `FleetView.told`; what this worker says alone when the hub does not answer."""
        number = next(self._numbers)
        texts: list[bytes] | None = await self._ask(Collect(number, topic, most), number, _COLLECT_S)
        return [self.tellers[topic](most)] if texts is None else texts

    async def set_draining(self, engine: Engine, *, draining: bool) -> None:
        """See `FleetView.set_draining`."""
        engine.draining = draining
        self._send(Drain(engine.name, draining))

    async def admit(self, member: Member) -> str | None:
        """See `FleetView.admit`."""
        number = next(self._numbers)
        done: Done | None = await self._ask(Admit(number, member), number, _COLLECT_S)
        return "the router's first process does not answer; try again" if done is None else done.refusal

    async def dismiss(self, name: str) -> None:
        """See `FleetView.dismiss`."""
        number = next(self._numbers)
        await self._ask(Dismiss(number, name), number, _COLLECT_S)

    def follow(self, on_roster: Callable[[Roster], None]) -> None:
        """Call `on_roster` with who belongs to the fleet: now, if that is known, and after every change."""
        self._on_roster = on_roster
        if self._roster is not None:
            on_roster(self._roster)

    async def _ask(self, message: Take | Collect | Admit | Dismiss, number: int, timeout_s: float) -> Any:
        if self._channel is None:
            return None
        loop = asyncio.get_running_loop()
        waiting = self._waiting[number] = loop.create_future()
        late = loop.call_later(timeout_s, self._answer, number, None)
        try:
            self._channel.send(message)
            return await waiting
        finally:
            late.cancel()
            del self._waiting[number]

    def _send(self, message: FromWorker) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _handle(self, message: FromHub) -> None:
        match message:
            case Took(number, taken):
                self._answer(number, taken)
            case Collected(number, texts):
                self._answer(number, texts)
            case Scrape(number, topic, most):
                if (tell := self.tellers.get(topic)) is not None:
                    self._send(Scraped(number, tell(most)))
            case Drain(engine, draining):
                self.on_drain(engine, draining)
            case Done(number, _):
                self._answer(number, message)
            case Enrol(roster):
                self._roster = roster
                if self._on_roster is not None:
                    self._on_roster(roster)

    def _answer(self, number: int, value: object) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)
