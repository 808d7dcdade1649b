"""One request to one engine: sends it, feeds the engine's breaker, and says how it failed.

What is the engine's own fault counts against it; what the client did wrong, or the client's leaving, does not.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import orjson

from kvduplex_router.clock import Clock
from kvduplex_router.errors import BadRequestError, EngineAnswerError
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.http.errors import ExchangeError, StaleConnectionError, StalledError
from kvduplex_router.http.response import Response
from kvduplex_router.requests.body import decode_members
from kvduplex_router.requests.fields import OWNED

__all__ = ["Hop", "HopFailedError", "open_hop", "reply_members"]

_OK: Final = 200
_CLIENT_ERRORS: Final = range(400, 500)
_INTERNAL: Final = 500
_ERROR_BODY_LIMIT: Final = 1024 * 1024
_LENGTH_MESSAGE: Final = re.compile(
    rb"context length|maximum model length|max_model_len|too many tokens|prompt is too long", re.IGNORECASE
)


class HopFailedError(Exception):
    """An engine did not do its part.

    Attributes:
        engine: Which.
        reason: ``connect``, ``timeout``, ``broken``, ``status`` or ``unusable``.
        status: Its status, when it answered one.
        consumed: Whether it may have read the request.
        stale: A pooled connection had been closed; the engine itself may be fine.
        retry_after: Its Retry-After, when it gave one.
    """

    def __init__(
        self,
        engine: Engine,
        reason: str,
        detail: str,
        *,
        status: int | None = None,
        consumed: bool = True,
        stale: bool = False,
        retry_after: str | None = None,
    ) -> None:
        super().__init__(f"{engine.role.value} engine {engine.name}: {detail}")
        self.engine = engine
        self.reason = reason
        self.detail = detail
        self.status = status
        self.consumed = consumed
        self.stale = stale
        self.retry_after = retry_after


class Hop:
    """An engine's answer whose status is 200; `close` it in any case."""

    __slots__ = ("_clock", "engine", "response")

    def __init__(self, engine: Engine, response: Response, clock: Clock) -> None:
        self.engine = engine
        self.response = response
        self._clock = clock

    async def read(self) -> bytes:
        """The next part of the body; empty at the end.

        Raises:
            HopFailedError: The answer broke off.
        """
        try:
            return await self.response.read()
        except ExchangeError as error:
            raise self._failure(error) from error

    async def read_all(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            HopFailedError: The answer broke off, or is larger than `limit` bytes.
        """
        try:
            body = await self.response.read_all(limit)
        except ExchangeError as error:
            raise self._failure(error) from error
        self.succeed()
        return body

    def succeed(self) -> None:
        """The engine did its part."""
        self.engine.breaker.success()
        self.engine.answered_at = self._clock()

    def unusable(self, detail: str) -> HopFailedError:
        """The engine answered 200 and nothing that can be used; returns the error to raise."""
        self.engine.breaker.fault()
        return HopFailedError(self.engine, "unusable", detail, status=self.response.status)

    def close(self) -> None:
        """Stop the engine's work unless it is done."""
        self.response.close()

    def _failure(self, error: ExchangeError) -> HopFailedError:
        return _failure(self.engine, error)


async def open_hop(engine: Engine, request: bytes, clock: Clock, *, resend: bool) -> Hop:
    """Send a complete request and wait for a good response head.

    Args:
        engine: Where to.
        request: What.
        clock: Monotonic seconds.
        resend: Whether the request may be sent again when a pooled connection turns out to be closed.

    Raises:
        HopFailedError: The engine failed.
        EngineAnswerError: The engine refused the request for the client's sake.
    """
    engine.breaker.attempt()
    try:
        response = await engine.pool.send(request, resend=resend)
    except ExchangeError as error:
        raise _failure(engine, error) from error
    engine.answered_at = clock()
    if response.status == _OK:
        return Hop(engine, response, clock)
    try:
        body = await response.read_all(_ERROR_BODY_LIMIT)
    except ExchangeError as error:
        raise _failure(engine, error) from error
    finally:
        response.close()
    raise _refusal(engine, response, body)


def _failure(engine: Engine, error: ExchangeError) -> HopFailedError:
    stale = isinstance(error, StaleConnectionError)
    if not stale:
        engine.breaker.fault()
    reason = "timeout" if isinstance(error, StalledError) else "broken" if error.consumed else "connect"
    return HopFailedError(engine, reason, str(error), consumed=error.consumed, stale=stale)


def _refusal(engine: Engine, response: Response, body: bytes) -> HopFailedError | EngineAnswerError:
    status = response.status
    retry_after = _integer_seconds(response.headers.get(b"retry-after"))
    if status in _CLIENT_ERRORS or (status == _INTERNAL and _LENGTH_MESSAGE.search(body)):
        engine.breaker.success()
        return _shown(status, _error_object(body, response.content_type), body, retry_after)
    engine.breaker.fault()
    return HopFailedError(engine, "status", f"answered {status}", status=status, retry_after=retry_after)


def _integer_seconds(value: bytes | None) -> str | None:
    return value.decode() if value is not None and value.isdigit() else None


def _error_object(body: bytes, content_type: str) -> dict[str, Any]:
    """The body as a JSON object; empty when it is none."""
    if content_type != "application/json":
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _shown(status: int, value: dict[str, Any], body: bytes, retry_after: str | None) -> EngineAnswerError:
    """What of an engine's refusal the client is shown: an error object as it is, older forms as one, nothing else."""
    if isinstance(value.get("error"), dict):
        if not OWNED.isdisjoint(value):
            body = orjson.dumps({name: member for name, member in value.items() if name not in OWNED})
        return EngineAnswerError(status, body=body, message="", retry_after=retry_after)
    message = value.get("message") or value.get("detail") or f"the engine refused the request with status {status}"
    kind = value.get("type")
    return EngineAnswerError(
        status,
        body=None,
        message=message if isinstance(message, str) else orjson.dumps(message).decode(),
        type=kind if isinstance(kind, str) else "invalid_request_error",
        retry_after=retry_after,
    )


def reply_members(hop: Hop, raw: bytes) -> dict[str, bytes | msgspec.Raw]:
    """Members of a JSON reply.

    Raises:
        HopFailedError: It is not a JSON object.
    """
    try:
        return dict(decode_members(raw))
    except BadRequestError:
        kind = hop.response.content_type or "no content type"
        raise hop.unusable(f"answered 200 with {len(raw)} bytes of {kind} instead of a JSON object") from None
