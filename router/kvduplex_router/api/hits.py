"""``/admin/hit-rate``: what hit rates suffer from, by what all processes of the router saw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from kvduplex_router.api.view import FleetView, Topic
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.telemetry.hits import Diagnosis, combined, diagnoses, troubles

__all__ = ["HitRates", "hits_router"]


class HitRates:
    """Asks all processes what they saw, and says what is wrong.

    Args:
        view: The processes.
        fleet: The engines.
    """

    def __init__(self, view: FleetView, fleet: Fleet) -> None:
        self._view = view
        self._fleet = fleet

    async def page(self) -> dict[str, Any]:
        """Every class's diagnosis, how full engines are, and how many processes answered."""
        found, answered = await self._look()
        classes = [each.as_builtins() for each in found]
        return {"classes": classes, "kv_usage": self._fleet.kv_usages, "workers_answered": answered}

    async def troubles(self) -> Mapping[str, str]:
        """In words, for the classes that suffer from something known."""
        found, _ = await self._look()
        return troubles(found)

    async def _look(self) -> tuple[list[Diagnosis], int]:
        """Every class's diagnosis, and how many processes answered."""
        told = await self._view.told(Topic.HITS)
        return diagnoses(combined(told), self._fleet.kv_usages), len(told)


def hits_router(rates: HitRates, *, workers: int) -> APIRouter:
    """The route ``/admin/hit-rate``."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/hit-rate", summary="What the cached share of prompts suffers from, by workload class")
    async def hit_rate() -> dict[str, Any]:
        return {**await rates.page(), "of_workers": workers}

    return router
