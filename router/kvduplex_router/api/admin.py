"""Operators' endpoints: what the fleet is doing, and who is in it."""

from __future__ import annotations

from typing import Any, Self

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import model_validator

from kvduplex_router.api.receive import check_media_type
from kvduplex_router.api.view import FleetView
from kvduplex_router.config import EngineConfig, EngineGroup
from kvduplex_router.errors import UnsupportedMediaTypeError
from kvduplex_router.fleet.engine import Engine, EngineRole
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.fleet.members import Member, Members

__all__ = ["admin_router"]


class NewEngine(EngineConfig):
    """An engine to add.

    Attributes:
        role: What it does.
    """

    role: EngineGroup

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.dp_size is not None:
            raise ValueError(
                f"dp_size {self.dp_size}: engines are added one at a time; give dp_rank, once for each rank"
            )
        return self


def admin_router(fleet: Fleet, members: Members, view: FleetView) -> APIRouter:
    """Routes under ``/admin``."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/engines", summary="All engines and their state")
    async def engines() -> list[dict[str, Any]]:
        return [_described(engine) for engine in fleet.engines]

    @router.post(
        "/engines",
        status_code=201,
        summary="Add an engine; it is used once it answers its probes",
        dependencies=[Depends(_json_alone)],
    )
    async def add(engine: NewEngine) -> dict[str, Any]:
        entry = EngineConfig.model_validate(engine.model_dump(exclude={"role"}))
        refusal = await view.admit(Member.of(EngineRole(engine.role.value), entry))
        if refusal is not None:
            raise HTTPException(409, f"engine '{entry.name}' cannot be added: {refusal}")
        return _described(_found(fleet, entry.name))

    @router.delete("/engines/{name}", summary="Take an engine out, whoever lists it; what it does goes on")
    async def remove(name: str) -> dict[str, Any]:
        engine = _found(fleet, name)
        await view.dismiss(name)
        return _described(engine)

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

    @router.get("/discovery", summary="Where engines are looked for, and what of it cannot be used")
    async def discovery() -> dict[str, Any]:
        roster = members.roster
        sources = [
            {"name": name, "engines": len(listed), "error": roster.errors.get(name)}
            for name, listed in {**{name: [] for name in roster.errors}, **roster.sources}.items()
        ]
        refused = [msgspec.to_builtins(each) for each in members.refused]
        return {"sources": sources, "refused": refused, "removed": roster.hidden}

    return router


def _json_alone(request: Request) -> None:
    try:
        check_media_type(dict(request.headers.raw))
    except UnsupportedMediaTypeError as error:
        raise HTTPException(error.status, error.message) from error


def _found(fleet: Fleet, name: str) -> Engine:
    engine = fleet.find(name)
    if engine is None:
        raise HTTPException(404, f"no engine is named '{name}'; GET /admin/engines lists them")
    return engine


def _described(engine: Engine) -> dict[str, Any]:
    load = engine.load
    return {
        "name": engine.name,
        "role": engine.role.value,
        "url": engine.address.origin.url,
        "dp_rank": engine.address.dp_rank,
        "source": engine.source,
        "health": engine.health.value,
        "breaker": engine.breaker.state.value,
        "usable": engine.usable,
        "draining": engine.draining,
        "shut_because": dict(engine.shut_because),
        "in_flight": engine.in_flight,
        "connections": engine.pool.open_connections,
        "leased": engine.address.lease_endpoint is not None,
        "traits": None if engine.traits is None else msgspec.to_builtins(engine.traits),
        "load": None if load is None else {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage},
    }
