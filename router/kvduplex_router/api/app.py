"""The FastAPI application, and the short way past it for requests that generate text.

FastAPI holds every route and the OpenAPI document. Requests to the generating endpoints reach the same ASGI objects
without passing its middleware, which would cost more than the rest of the router.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from kvduplex_router.api.guard import PRINCIPAL, PROBES, Guard
from kvduplex_router.api.passthrough import passes
from kvduplex_router.api.reply import Receive, Scope, Send
from kvduplex_router.api.schemas import EXAMPLES
from kvduplex_router.errors import RouterError
from kvduplex_router.telemetry.metrics import Metrics

__all__ = ["AsgiApp", "Front", "build_app"]

"""Paths that load balancers and monitors ask for by HEAD too."""

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(
    *, endpoints: Mapping[str, AsgiApp], routers: Iterable[APIRouter], lifespan: Lifespan, version: str
) -> FastAPI:
    """Put all routes into one application.

    Args:
        endpoints: ASGI applications of the generating endpoints, by path.
        routers: All other routes.
        lifespan: What runs while the application does.
        version: For the OpenAPI document.
    """
    app = FastAPI(title="kvduplex router", version=version, lifespan=lifespan, docs_url=None, redoc_url=None)
    for router in routers:
        app.include_router(router)
    for path, endpoint in endpoints.items():
        app.router.routes.append(_raw_route(path, endpoint))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


class Front:
    """The ASGI application that is served: generating endpoints at once, everything else through FastAPI.

    Args:
        app: All routes.
        endpoints: ASGI applications of the generating endpoints, by path.
        passthrough: Serves what no route serves and an engine may.
        guard: Stands in front of all of them.
        metrics: Counts what is refused.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        endpoints: Mapping[str, AsgiApp],
        passthrough: AsgiApp,
        guard: Guard,
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._endpoints = dict(endpoints)
        self._passthrough = passthrough
        self._guard = guard
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        try:
            scope[PRINCIPAL] = self._guard.admit(path, dict(scope["headers"]))
        except RouterError as error:
            self._metrics.rejections.inc(error.reason)
            await self._guard.refuse(error, scope, send)
            return
        endpoint = self._endpoints.get(path)
        if endpoint is not None and method == "POST":
            await endpoint(scope, receive, send)
        elif endpoint is None and path != "/v1/models" and passes(method, path):
            await self._passthrough(scope, receive, send)
        else:
            asked = {**scope, "method": "GET"} if method == "HEAD" and path in PROBES else scope
            with contextlib.suppress(asyncio.CancelledError):  # by the server's end, when the connection is gone
                await self._app(asked, receive, send)  # the server sends no body to HEAD


def _raw_route(path: str, endpoint: AsgiApp) -> APIRoute:
    class RawRoute(APIRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["method"] == "POST":
                await endpoint(scope, receive, send)
            else:
                await super().handle(scope, receive, send)

    return RawRoute(
        path, _documented, methods=["POST"], tags=["inference"], name=path, summary=f"POST {path}",
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": EXAMPLES[path]}}},
        responses={status: {"description": text} for status, text in _STATUSES.items()},
    )  # fmt: skip


async def _documented() -> None:
    """Answered by the engines; see the API's own reference for the body."""


_STATUSES: dict[int | str, str] = {
    400: "The body cannot be understood", 413: "The body is too large", 429: "At a limit; Retry-After says how long",
    502: "An engine failed", 503: "No engine is usable", 504: "An engine kept silent too long",
}  # fmt: skip


async def _http_error(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    kind = "not_found_error" if status == HTTPStatus.NOT_FOUND else "invalid_request_error"
    detail: Any = error.detail if isinstance(error, HTTPException) else "internal error"
    body = {"error": {"message": str(detail), "type": kind, "param": None, "code": status}}
    return Response(orjson.dumps(body), status, media_type="application/json")


async def _invalid(_request: Request, error: Exception) -> Response:
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": str(error)}
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{place}{': ' if place else ''}{str(first['msg']).removeprefix('Value error, ')}"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": place or None, "code": 400}}
    return Response(orjson.dumps(body), 400, media_type="application/json")
