"""What operators see and change: of this process, or of all processes of a router."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.members import Member, Members

__all__ = ["FleetView", "LocalView", "Tellers", "Topic"]


class Topic(StrEnum):
    """What every process of a router can say of itself."""

    METRICS = "metrics"
    HITS = "hits"
    RECEIPTS = "receipts"


Tellers = Mapping[Topic, Callable[[int], bytes]]
"""How this process says it: given how many items are wanted at most, encoded."""


class FleetView(Protocol):
    """A view of a router."""

    async def metrics(self) -> bytes:
        """The text exposition."""

    async def told(self, topic: Topic, *, most: int = 0) -> list[bytes]:
        """What each process says of a topic; of processes that do not answer in time nothing."""

    async def set_draining(self, engine: Engine, *, draining: bool) -> None:
        """Stop or resume sending to an engine."""

    async def admit(self, member: Member) -> str | None:
        """Add an engine; returns why it cannot be taken, or None."""

    async def dismiss(self, name: str) -> None:
        """Take an engine out of the fleet."""


class LocalView:
    """A router of one process."""

    def __init__(self, tellers: Tellers, members: Members) -> None:
        self._tellers = tellers
        self._members = members

    async def metrics(self) -> bytes:
        """See `FleetView.metrics`."""
        return self._tellers[Topic.METRICS](0)

    async def told(self, topic: Topic, *, most: int = 0) -> list[bytes]:
        """See `FleetView.told`."""
        return [self._tellers[topic](most)]

    async def set_draining(self, engine: Engine, *, draining: bool) -> None:
        """See `FleetView.set_draining`."""
        engine.draining = draining

    async def admit(self, member: Member) -> str | None:
        """See `FleetView.admit`."""
        return self._members.admit(member)

    async def dismiss(self, name: str) -> None:
        """See `FleetView.dismiss`."""
        self._members.dismiss(name)
