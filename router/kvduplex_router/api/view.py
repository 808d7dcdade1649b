"""What operators see and change: of this process, or of all processes of a router."""

from __future__ import annotations

from typing import Protocol

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.telemetry.metrics import Metrics

__all__ = ["FleetView", "LocalView"]


class FleetView(Protocol):
    """A view of a router."""

    async def metrics(self) -> bytes:
        """The text exposition."""

    async def set_draining(self, engine: Engine, *, draining: bool) -> None:
        """Stop or resume sending to an engine."""


class LocalView:
    """A router of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def metrics(self) -> bytes:
        """See `FleetView.metrics`."""
        return self._metrics.render()

    async def set_draining(self, engine: Engine, *, draining: bool) -> None:
        """See `FleetView.set_draining`."""
        engine.draining = draining
