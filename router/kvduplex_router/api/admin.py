"""Operators' endpoints: what the fleet is doing, and taking an engine out of it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException

from kvduplex_router.api.view import FleetView
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import Fleet

__all__ = ["admin_router"]


def admin_router(fleet: Fleet, view: FleetView) -> APIRouter:
    """Routes under ``/admin``."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/engines", summary="All engines and their state")
    async def engines() -> list[dict[str, Any]]:
        return [_described(engine) for engine in fleet.engines]

    @router.post("/engines/{name}/drain", summary="Send nothing new to an engine; what it does goes on")
    async def drain(name: str) -> dict[str, Any]:
        engine = _found(fleet, name)
        await view.set_draining(engine, draining=True)
        return _described(engine)

    @router.post("/engines/{name}/resume", summary="Use a drained engine again")
    async def resume(name: str) -> dict[str, Any]:
        engine = _found(fleet, name)
        await view.set_draining(engine, draining=False)
        return _described(engine)

    return router


def _found(fleet: Fleet, name: str) -> Engine:
    engine = fleet.find(name)
    if engine is None:
        raise HTTPException(404, f"no engine is named '{name}'; GET /admin/engines lists them")
    return engine


def _described(engine: Engine) -> dict[str, Any]:
    return {
        "name": engine.name,
        "role": engine.role.value,
        "health": engine.health.value,
        "breaker": engine.breaker.state.value,
        "draining": engine.draining,
        "in_flight": engine.in_flight,
        "connections": engine.pool.open_connections,
        "leased": engine.address.lease_endpoint is not None,
    }
