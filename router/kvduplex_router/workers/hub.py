"""The hub: the process that starts the workers, keeps their common ledger and asks them all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Final

from kvduplex_router.api.view import Topic
from kvduplex_router.conversations.ledger import LocalLedger, OwnLedger
from kvduplex_router.fleet.members import Members
from kvduplex_router.telemetry.merge import merged
from kvduplex_router.workers.channel import Channel
from kvduplex_router.workers.messages import (
    Admit,
    Collect,
    Collected,
    Dismiss,
    Done,
    Drain,
    Enrol,
    FromWorker,
    Put,
    PutBack,
    Release,
    Scrape,
    Scraped,
    Take,
    Took,
    decode_from_worker,
)

__all__ = ["Hub"]

_SCRAPE_S: Final = 2.0


class Hub:
    """Answers workers on a Unix socket.

    Args:
        ledger: The ledger they share.
        members: Who belongs to the fleet; workers follow it.
    """

    def __init__(self, ledger: OwnLedger, members: Members) -> None:
        self._ledger = ledger
        self._at_once = ledger if isinstance(ledger, LocalLedger) else None
        self._members = members
        members.on_change = self._enrol
        self._workers: set[Channel] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scrapes: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._draining: dict[str, bool] = {}
        self._server: asyncio.Server | None = None

    @property
    def workers(self) -> int:
        """Workers connected now."""
        return len(self._workers)

    async def start(self, path: Path) -> None:
        """Listen at `path`, in a folder only this user can enter."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: Channel(on_made=self._greet, on_body=self._hear, on_lost=self._workers.discard), str(path)
        )

    async def close(self) -> None:
        """Drop all workers."""
        if self._server is not None:
            self._server.close()
        for worker in list(self._workers):
            worker.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _greet(self, worker: Channel) -> None:
        self._workers.add(worker)
        worker.send(Enrol(self._members.roster))
        for engine, draining in self._draining.items():
            worker.send(Drain(engine, draining))

    def _hear(self, worker: Channel, body: bytes) -> None:
        self._handle(decode_from_worker(body), worker)

    def _handle(self, message: FromWorker, worker: Channel) -> None:
        match message:
            case Take(number, keys):
                if self._at_once is not None:
                    worker.send(Took(number, self._at_once.take_now(keys)))
                else:
                    self._spawn(self._take(number, keys, worker))
            case Put(key, reference, keep_s):
                self._ledger.put(key, reference, keep_s)
            case PutBack(key, reference, keep_s):
                self._ledger.put_back(key, reference, keep_s)
            case Release(engine, lease):
                self._ledger.release(engine, lease)
            case Scraped(number, text):
                waiting = self._scrapes.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(text)
            case Collect():
                self._spawn(self._collect(message, worker))
            case _:
                self._operate(message, worker)

    def _operate(self, message: Admit | Dismiss | Drain, worker: Channel) -> None:
        """Carry out what an operator asked a worker for."""
        match message:
            case Admit(number, member):
                worker.send(Done(number, self._members.admit(member)))
            case Dismiss(number, name):
                self._members.dismiss(name)
                worker.send(Done(number, None))
            case Drain(engine, draining):
                self._draining[engine] = draining
                for each in self._workers:
                    each.send(message)

    def _enrol(self) -> None:
        for worker in self._workers:
            worker.send(Enrol(self._members.roster))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, number: int, keys: Sequence[bytes], worker: Channel) -> None:
        worker.send(Took(number, await self._ledger.take(keys)))

    async def _collect(self, message: Collect, worker: Channel) -> None:
        topic, most = message.topic, message.most
        answers = await asyncio.gather(*(self._scrape(worker, topic, most) for worker in list(self._workers)))
        texts = list(filter(None, answers))
        if topic is Topic.METRICS:
            texts = [merged([*texts, self._own_metrics()])]
        worker.send(Collected(message.number, texts))

    def _own_metrics(self) -> bytes:
        return "".join(
            f"# HELP kvduplex_router_{name} {name.replace('_', ' ').capitalize()}.\n"
            f"# TYPE kvduplex_router_{name} gauge\nkvduplex_router_{name} {value}\n"
            for name, value in {**self._ledger.counts_now(), "workers": self.workers}.items()
        ).encode()

    async def _scrape(self, worker: Channel, topic: Topic, most: int) -> bytes:
        """What a worker says; nothing from one that does not answer in time."""
        number = next(self._numbers)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._scrapes[number] = waiting
        try:
            worker.send(Scrape(number, topic, most))
            async with asyncio.timeout(_SCRAPE_S):
                return await waiting
        except TimeoutError:
            return b""
        finally:
            self._scrapes.pop(number, None)
