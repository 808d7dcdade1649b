"""Endpoints about the router and its fleet: liveness, readiness, metrics, models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import orjson
from fastapi import APIRouter, Response

from kvduplex_router.api.view import FleetView
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.http.errors import ExchangeError
from kvduplex_router.http.request import get_request

__all__ = ["operations_router"]

_MODELS_TIMEOUT_S: Final = 5.0
_MODELS_LIMIT: Final = 4 * 1024 * 1024
_OK: Final = 200


def operations_router(fleet: Fleet, view: FleetView, *, version: str, engine_headers: bytes = b"") -> APIRouter:
    """Routes over a fleet; `version` is the router's own, `engine_headers` are header lines for engines."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", summary="The router is alive")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ping", summary="The same, by the name that SageMaker asks for", response_class=Response)
    @router.post("/ping", summary="The same, by the name that SageMaker asks for", response_class=Response)
    async def ping() -> Response:
        return Response()

    @router.get("/version", summary="The router's version")
    async def own_version() -> dict[str, str]:
        return {"version": version}

    @router.get("/ready", summary="Every role has an engine that answers", responses={503: {"description": "Not yet"}})
    async def ready() -> Response:
        missing = fleet.missing()
        body = {"ready": not missing, "missing": missing, "engines": {e.name: e.health.value for e in fleet.engines}}
        return Response(orjson.dumps(body), 503 if missing else 200, media_type="application/json")

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics_text() -> Response:
        return Response(await view.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/models", summary="Models of all engines", tags=["inference"])
    async def models() -> Response:
        lists = await asyncio.gather(*(_models(engine, engine_headers) for engine in fleet.engines if engine.usable))
        found = _merged(entry for models in lists for entry in models or ())
        if not found and all(models is None for models in lists):
            error = {
                "message": "no engine answers now",
                "type": "service_unavailable_error",
                "param": None,
                "code": None,
            }
            return Response(orjson.dumps({"error": error}), 503, media_type="application/json")
        return Response(orjson.dumps({"object": "list", "data": found}), media_type="application/json")

    return router


async def _models(engine: Engine, headers: bytes) -> list[dict[str, Any]] | None:
    """An engine's models; None when it does not answer properly."""
    try:
        async with asyncio.timeout(_MODELS_TIMEOUT_S):
            response = await engine.pool.send(get_request(engine.address.origin, "/v1/models", headers))
            try:
                raw = await response.read_all(_MODELS_LIMIT)
            finally:
                response.close()
        data = orjson.loads(raw).get("data") if response.status == _OK else None
    except (ExchangeError, TimeoutError, orjson.JSONDecodeError, AttributeError):
        return None
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else None


def _merged(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    by_id: dict[str, dict[str, Any]] = {}
    for entry in entries:
        by_id.setdefault(str(entry.get("id")), entry)
    return list(by_id.values())
