"""Asks an engine over HTTP how it is, what it is and how much it has to do."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.traits import Traits, read_traits
from kvduplex_router.http.errors import ExchangeError, StalledError
from kvduplex_router.http.request import get_request

__all__ = ["Asker"]

_OK: Final = 200
_HEALTH_LIMIT: Final = 64 * 1024
_LIMIT: Final = 8 * 1024 * 1024


class Asker:
    """Small GET requests to engines, each with a deadline.

    Args:
        headers: Header lines, for engines that ask for a key.
        timeout_s: Seconds for one answer.
    """

    def __init__(self, headers: bytes, *, timeout_s: float) -> None:
        self._headers = headers
        self._timeout_s = timeout_s

    async def healthy(self, engine: Engine) -> bool | None:
        """Whether it says it is well; None when it is silent."""
        try:
            return (await self._get(engine, "/health", _HEALTH_LIMIT))[0] == _OK
        except (TimeoutError, StalledError):
            return None
        except ExchangeError:
            return False

    async def exposition(self, engine: Engine) -> str | None:
        """Its metrics; None when it has none to give."""
        raw = await self._found(engine, "/metrics")
        return None if raw is None else raw.decode("utf-8", "replace")

    async def traits(self, engine: Engine, exposition: str) -> Traits:
        """What it is; members that cannot be found out are None."""
        version = await self._json(engine, "/version")
        info = await self._json(engine, "/get_server_info") if version is None else None
        models = await self._json(engine, "/v1/models")
        return read_traits(models=models, version=version, server_info=info, exposition=exposition)

    async def _json(self, engine: Engine, path: str) -> Any:
        raw = await self._found(engine, path)
        try:
            return None if raw is None else orjson.loads(raw)
        except orjson.JSONDecodeError:
            return None

    async def _found(self, engine: Engine, path: str) -> bytes | None:
        try:
            status, raw = await self._get(engine, path, _LIMIT)
        except (TimeoutError, ExchangeError):
            return None
        return raw if status == _OK else None

    async def _get(self, engine: Engine, path: str, limit: int) -> tuple[int, bytes]:
        request = get_request(engine.address.origin, path, self._headers)
        async with asyncio.timeout(self._timeout_s):
            response = await engine.pool.send(request)
            try:
                return response.status, await response.read_all(limit)
            finally:
                response.close()
