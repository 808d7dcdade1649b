"""A circuit breaker fed by an engine's own faults only: what a client did wrong never counts."""

from __future__ import annotations

from enum import StrEnum

from kvduplex_router.clock import Clock

__all__ = ["Breaker", "BreakerState"]


class BreakerState(StrEnum):
    """``HALF_OPEN`` lets one request through to find out."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens after `failures` faults in a row, and tries one request every `open_s` seconds until one succeeds."""

    def __init__(self, *, failures: int, open_s: float, clock: Clock) -> None:
        self._limit = failures
        self._open_s = open_s
        self._clock = clock
        self._faults = 0
        self._retry_at: float | None = None
        self.closed = True  # kept beside `state`, for it is asked many times a request

    @property
    def state(self) -> BreakerState:
        """Where it stands now."""
        if self._retry_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._clock() >= self._retry_at else BreakerState.OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be sent."""
        return self._retry_at is None or self._clock() >= self._retry_at

    def attempt(self) -> None:
        """A request is being sent; in ``HALF_OPEN`` this uses up the one trial."""
        if self._retry_at is not None:
            self._retry_at = self._clock() + self._open_s
            self.closed = False

    def success(self) -> None:
        """The engine did its part."""
        self._faults = 0
        self._retry_at = None
        self.closed = True

    def fault(self) -> None:
        """The engine failed by its own fault."""
        self._faults += 1
        if self._faults >= self._limit:
            self._retry_at = self._clock() + self._open_s
            self.closed = False
