"""Replaces a running service by its successor without a gap: the new one serves before the old one is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvduplex.errors import EngineFailedError
from kvduplex.node.service import Service

__all__ = ["Running", "Succession"]

Design = TypeVar("Design")


@dataclass(frozen=True, slots=True)
class Running:
    """A service, and how it is told to stop."""

    service: Service
    stop: asyncio.Event
    task: asyncio.Task[None] = field(compare=False)

    @classmethod
    def start(cls, service: Service, stop: asyncio.Event) -> Running:
        """Run `service` in a task of its own."""
        return cls(service, stop, asyncio.create_task(service.run()))


class Succession(Generic[Design]):
    """One service after another, each made from a design.

    Args:
        start: Starts the service of a design.
        changes: Waits until there is another design than the one given and returns it, or None to end.
        report: Is told what is going on.
    """

    def __init__(
        self,
        *,
        start: Callable[[Design], Running],
        changes: Callable[[Design], Awaitable[Design | None]],
        report: Callable[[str], None],
    ) -> None:
        self._start = start
        self._changes = changes
        self._report = report
        self._retired: set[asyncio.Task[None]] = set()

    async def run(self, design: Design) -> None:
        """Serve `design` and its successors until `changes` ends it, and let every service end by itself.

        Raises:
            EngineFailedError: The service in office failed. A successor that fails is reported, and the old one stays.
        """
        current = self._start(design)
        try:
            while (wanted := await self._next(current, design)) is not None:
                design = wanted
                current = await self._succeed(current, wanted)
        finally:
            current.stop.set()
            await asyncio.gather(current.task, *self._retired, return_exceptions=True)
        current.task.result()

    async def _next(self, current: Running, design: Design) -> Design | None:
        change = asyncio.ensure_future(self._changes(design))
        events: set[asyncio.Future[Any]] = {change, current.task}
        try:
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not change.done():
                change.cancel()
        return change.result() if change.done() and not change.cancelled() else None

    async def _succeed(self, current: Running, design: Design) -> Running:
        successor = self._start(design)
        ready = asyncio.ensure_future(successor.service.ready.wait())
        events: set[asyncio.Future[Any]] = {ready, successor.task, current.task}
        try:
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not successor.service.ready.is_set() and not current.task.done():
            await self._give_up(successor)
            return current
        current.stop.set()
        self._retired = {task for task in self._retired if not task.done()} | {current.task}
        return successor

    async def _give_up(self, successor: Running) -> None:
        successor.stop.set()
        try:
            await successor.task
        except EngineFailedError as error:
            self._report(f"the successor failed, so the old one stays: {error}")
