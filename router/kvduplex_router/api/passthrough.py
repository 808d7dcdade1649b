"""Requests that the router does not look into: whole to one engine, and its answer as it comes."""

from __future__ import annotations

import logging
from typing import Final

from kvduplex_router.api.client import Client
from kvduplex_router.api.receive import ClientGoneError, check_media_type
from kvduplex_router.api.reply import Receive, Scope, Send, send_error
from kvduplex_router.config import RouterConfig
from kvduplex_router.errors import (
    BadGatewayError,
    BadRequestError,
    BodyTooLargeError,
    GatewayTimeoutError,
    NotFoundError,
    RequestTimeoutError,
    RouterError,
    StoppingError,
    UnavailableError,
)
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.http.errors import ConnectError, ExchangeError, StalledError
from kvduplex_router.http.request import forwardable, request_bytes
from kvduplex_router.http.watchdog import Watchdog
from kvduplex_router.pd.decode import BrokenStreamError
from kvduplex_router.pd.shape import whole_body
from kvduplex_router.requests.apis.openai_errors import DONE, OPENAI_ERRORS
from kvduplex_router.requests.body import Body
from kvduplex_router.routing.admission import Admission
from kvduplex_router.routing.picker import PickContext
from kvduplex_router.telemetry.metrics import Metrics

__all__ = ["Passthrough", "passes"]

_log = logging.getLogger("kvduplex.router.passthrough")

_ROOTS: Final = ("/v1/", "/v2/")
_PATHS: Final = frozenset({"/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/classify"})
_REFUSED: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_METHODS: Final = frozenset({"GET", "POST", "DELETE"})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_KEPT: Final = (b"content-type", b"content-length", b"retry-after")
_FORM: Final = b"multipart/form-data"
"""What audio is sent as."""
_SENT: Final = (b"content-type", b"accept")


def passes(method: str, path: str) -> bool:
    """Whether a request is passed through; what changes an engine for everybody is not."""
    if method not in _METHODS or "/.." in path or "//" in path or not path.isascii() or not path.isprintable():
        return False
    return path in _PATHS or (path.startswith(_ROOTS) and not path.startswith(_REFUSED) and " " not in path)


class Passthrough:
    """An ASGI application for everything else under ``/v1``."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        admission: Admission,
        metrics: Metrics,
        watchdog: Watchdog,
        config: RouterConfig,
        engine_headers: bytes,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._watchdog = watchdog
        self._limits = config.limits
        self._timeouts = config.timeouts
        self._engine_headers = engine_headers
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        client = Client(scope, receive, send, write_s=self._timeouts.client_write_s, watchdog=self._watchdog)
        outcome = "ok"
        self.in_flight += 1
        try:
            raw = await client.body(limit=self._limits.body_bytes, timeout_s=self._timeouts.upload_s)
            if raw:
                check_media_type(client.headers, _FORM)
            await client.while_connected(self._pass(scope, raw, client), last_frame=(DONE,))
        except (BodyTooLargeError, RequestTimeoutError) as error:
            outcome = error.reason
            await client.refuse_unread(error, OPENAI_ERRORS, {})
        except StoppingError as error:
            outcome = error.reason
            if not client.reply.started:  # uvicorn drops the connection of an answer that was not ended
                await send_error(client.reply, error, OPENAI_ERRORS, {})
        except RouterError as error:
            outcome = error.reason
            await send_error(client.reply, error, OPENAI_ERRORS, {})
        except ClientGoneError:
            outcome = "ok" if client.has_all else "client_gone"
        except BrokenStreamError:
            outcome = "broken_stream"  # uvicorn drops the connection of an answer that was not ended
        finally:
            client.close()
            self.in_flight -= 1
            self._metrics.turns.inc("other", "replica", outcome)

    async def _pass(self, scope: Scope, raw: bytes, client: Client) -> None:
        what = "decode" if self._fleet.disaggregated else "serving"
        seat = await self._admission.seat(self._fleet.whole, PickContext(), what=what)
        try:
            await self._exchange(seat.engine, scope, raw, client)
        except ExchangeError as error:
            seat.engine.breaker.fault()
            _log.warning("%s at %s: %s", scope["path"], seat.engine.name, error)
            if not client.reply.started:
                raise _client_error(error) from error
            raise BrokenStreamError(str(error)) from error
        finally:
            seat.leave()

    async def _exchange(self, engine: Engine, scope: Scope, raw: bytes, client: Client) -> None:
        response = await engine.pool.send(self._request(engine, scope, raw, client))
        try:
            if response.status in _REDIRECTS:  # to the engine's own address, which clients are not told
                raise NotFoundError("there is no such path here; engines may know it without the slash at its end")
            headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in response.headers.items() if n in _KEPT}
            content_type = headers.pop("content-type", "application/octet-stream")
            await client.reply.start(response.status, content_type, headers)
            while data := await response.read():
                await client.reply.send(data)
            await client.reply.end()
        finally:
            response.close()
        engine.breaker.success()

    def _request(self, engine: Engine, scope: Scope, raw: bytes, client: Client) -> bytes:
        query = scope.get("query_string", b"")
        target = scope["path"].encode("ascii") + (b"?" + query if query else b"")
        headers = forwardable((name, client.headers[name]) for name in _SENT if name in client.headers)
        body = _cleaned(raw, client.headers.get(b"content-type", b""))
        return request_bytes(engine.address.origin, scope["method"], target, headers + self._engine_headers, body)


def _cleaned(raw: bytes, content_type: bytes) -> bytes:
    """The body without fields the router owns; what is no JSON object has none."""
    if b"multipart/" in content_type or not raw:
        return raw
    try:
        return whole_body(Body.parse(raw))
    except BadRequestError:
        return raw


def _client_error(error: ExchangeError) -> RouterError:
    if isinstance(error, StalledError):
        return GatewayTimeoutError("the engine did not answer in time")
    if isinstance(error, ConnectError):
        return UnavailableError("the engine cannot be reached", retry_after_s=2)
    return BadGatewayError("the engine broke off before it answered")
