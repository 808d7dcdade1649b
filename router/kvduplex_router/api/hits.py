"""``/admin/hit-rate``: what hit rates suffer from."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.telemetry.hits import HitDoctor, as_builtins

__all__ = ["hits_router"]


def hits_router(doctor: HitDoctor, fleet: Fleet, *, workers: int) -> APIRouter:
    """The doctor's page; with several workers that of the one that answers."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/hit-rate", summary="What the cached share of prompts suffers from, by workload class")
    async def hit_rate() -> dict[str, Any]:
        usages = fleet.kv_usages
        classes = [as_builtins(each, doctor.prompts.usual(each.workload)) for each in doctor.diagnoses(usages)]
        return {"classes": classes, "kv_usage": usages, "of_workers": workers}

    return router
