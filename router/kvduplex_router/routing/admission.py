"""Gives a request a seat at an engine: at once, after a bounded wait, or not at all with the right status.

A seat counts as load from the decision on, so that requests decided together do not all see the same idle engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvduplex_router.errors import SaturatedError, UnavailableError
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.routing.desk import Reservation
from kvduplex_router.routing.picker import PickContext, Picker

__all__ = ["Admission", "Seat"]

_RETRY_AFTER_S = 2


Reserve = Callable[[Engine, PickContext], Reservation | None]
"""Enters a request into the figures of the engine that it was given to."""


class Seat:
    """One request's place at an engine; given back exactly once.

    Attributes:
        engine: Where.
        reservation: Its work there, where that is counted.
        reason: What decided the choice; empty where no policy did.
    """

    __slots__ = ("_admission", "engine", "reason", "reservation")

    def __init__(
        self, engine: Engine, admission: Admission, reservation: Reservation | None = None, reason: str = ""
    ) -> None:
        self.engine = engine
        self.reason = reason
        self.reservation = reservation
        self._admission: Admission | None = admission
        engine.in_flight += 1

    def first(self) -> None:
        """The engine has computed the prompt."""
        if self.reservation is not None:
            self.reservation.first()

    def learn(self, prompt: int | None, cached: int | None, generated: int | None = None) -> None:
        """The engine said how long prompt and answer were and how much of the prompt it held; None where it did not.

        To be called when the answer has just ended.
        """
        if self.reservation is not None:
            self.reservation.learn(prompt, cached, generated)

    def leave(self) -> None:
        """Give the seat back; further calls do nothing."""
        admission, self._admission = self._admission, None
        if admission is not None:
            self.engine.in_flight -= 1
            if self.reservation is not None:
                self.reservation.end()
            admission.seat_free()


@dataclass(slots=True)
class _Waiter:
    candidates: Sequence[Engine]
    context: PickContext
    granted: asyncio.Future[Seat]


class Admission:
    """Seats over all engines, with one first-come queue.

    Args:
        picker: Chooses engines.
        queued: Requests that may wait.
        queue_s: How long one waits.
        reserve: Enters requests into engines' figures.
    """

    def __init__(
        self, picker: Picker, *, queued: int, queue_s: float, reserve: Reserve = lambda _engine, _context: None
    ) -> None:
        self._picker = picker
        self._reserve = reserve
        self._limit = queued
        self._queue_s = queue_s
        self._waiters: deque[_Waiter] = deque()

    @property
    def queued(self) -> int:
        """Requests waiting."""
        return len(self._waiters)

    async def seat(self, candidates: Sequence[Engine], context: PickContext, *, what: str) -> Seat:
        """A seat at one of `candidates`.

        Args:
            candidates: Engines that could serve the hop.
            context: What the choice may depend on.
            what: Role of the candidates, for messages.

        Raises:
            UnavailableError: None is usable.
            SaturatedError: All usable ones are full, and so is the queue, or the wait was too long.
        """
        engine = None if self._waiters else self._picker.pick(candidates, context)
        if engine is not None:
            return self.seated(engine, context)
        if not any(each.usable and each.name not in context.excluded for each in candidates):
            message = f"no {what} engine is usable now; /ready says which are down"
            raise UnavailableError(message, retry_after_s=_RETRY_AFTER_S)
        return await self._wait(_Waiter(candidates, context, asyncio.get_running_loop().create_future()), what)

    def seat_free(self) -> None:
        """Serve the waiters that can be served now, first come first."""
        if not self._waiters:
            return
        for waiter in list(self._waiters):
            if waiter.granted.done():
                continue
            engine = self._picker.pick(waiter.candidates, waiter.context)
            if engine is not None:
                waiter.granted.set_result(self.seated(engine, waiter.context))

    def seated(self, engine: Engine, context: PickContext) -> Seat:
        """A seat at an engine that was picked."""
        reason = "" if context.chosen is None else context.chosen.reason.value
        return Seat(engine, self, self._reserve(engine, context), reason)

    async def _wait(self, waiter: _Waiter, what: str) -> Seat:
        if len(self._waiters) >= self._limit:
            raise SaturatedError(f"all {what} engines are at their limit", retry_after_s=_RETRY_AFTER_S)
        self._waiters.append(waiter)
        self.seat_free()
        try:
            async with asyncio.timeout(self._queue_s):
                return await waiter.granted
        except TimeoutError:
            self._take_back(waiter)
            message = f"all {what} engines stayed at their limit for {self._queue_s:g} s"
            raise SaturatedError(message, retry_after_s=_RETRY_AFTER_S) from None
        except asyncio.CancelledError:
            self._take_back(waiter)
            raise
        finally:
            self._waiters.remove(waiter)

    @staticmethod
    def _take_back(waiter: _Waiter) -> None:
        if waiter.granted.done() and not waiter.granted.cancelled():
            waiter.granted.result().leave()
