"""What operators see and change: of this process, or of all processes of a router."""

from __future__ import annotations

from typing import Protocol

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.members import Member, Members
from kvduplex_router.telemetry.metrics import Metrics

__all__ = ["FleetView", "LocalView"]


class FleetView(Protocol):
    """A view of a router."""

    async def metrics(self) -> bytes:
        """The text exposition."""

    async def set_draining(self, engine: Engine, *, draining: bool) -> None:
        """Stop or resume sending to an engine."""

    async def admit(self, member: Member) -> str | None:
        """Add an engine; returns why it cannot be taken, or None."""

    async def dismiss(self, name: str) -> None:
        """Take an engine out of the fleet."""


class LocalView:
    """A router of one process."""

    def __init__(self, metrics: Metrics, members: Members) -> None:
        self._metrics = metrics
        self._members = members

    async def metrics(self) -> bytes:
        """See `FleetView.metrics`."""
        return self._metrics.render()

    async def set_draining(self, engine: Engine, *, draining: bool) -> None:
        """See `FleetView.set_draining`."""
        engine.draining = draining

    async def admit(self, member: Member) -> str | None:
        """See `FleetView.admit`."""
        return self._members.admit(member)

    async def dismiss(self, name: str) -> None:
        """See `FleetView.dismiss`."""
        self._members.dismiss(name)
