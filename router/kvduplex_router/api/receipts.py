"""What was decided for the last turns, for operators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from kvduplex_router.api.view import FleetView, Topic
from kvduplex_router.pd.receipts import newest

__all__ = ["receipts_router"]


def receipts_router(view: FleetView) -> APIRouter:
    """The route ``/admin/receipts``, of all processes."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/receipts", summary="Plans of the last turns, and what came of them")
    async def receipts(count: Annotated[int, Query(ge=1, le=10_000)] = 100) -> list[dict[str, Any]]:
        return newest(await view.told(Topic.RECEIPTS, most=count), count)

    return router
