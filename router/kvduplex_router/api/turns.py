"""The endpoints that generate text: raw ASGI from the client's bytes to the engines' and back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from typing import Final

import orjson

from kvduplex_router.api.auth import Principal
from kvduplex_router.api.client import Client
from kvduplex_router.api.guard import PRINCIPAL
from kvduplex_router.api.receive import ClientGoneError, check_media_type
from kvduplex_router.api.reply import Receive, Scope, Send, send_error
from kvduplex_router.config import RouterConfig
from kvduplex_router.conversations.keys import checked_conversation_id
from kvduplex_router.errors import (
    BodyTooLargeError,
    EngineAnswerError,
    RequestTimeoutError,
    RouterError,
    StoppingError,
)
from kvduplex_router.http.request import forwardable
from kvduplex_router.http.watchdog import Watchdog
from kvduplex_router.pd.decode import BrokenStreamError
from kvduplex_router.pd.receipts import ReceiptRing
from kvduplex_router.pd.request import Receipt, TurnRequest
from kvduplex_router.pd.turn import TurnRunner
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.fields import CONVERSATION_ID
from kvduplex_router.requests.kinds import ApiKind
from kvduplex_router.telemetry.metrics import Metrics
from kvduplex_router.telemetry.tracing import Tracing, TurnTrace

__all__ = ["TurnEndpoint", "new_request_id"]

_log = logging.getLogger("kvduplex.router.turn")
_TRACE: Final[tuple[bytes, ...]] = (b"traceparent", b"tracestate")
_KEY: Final[tuple[bytes, ...]] = (b"authorization",)


_PREFIX: Final = secrets.token_hex(8)
_numbers: Final = itertools.count(1)


def new_request_id() -> str:
    """A fresh id for one turn: 64 random bits of this process, then a number."""
    return f"{_PREFIX}{next(_numbers):016x}"


class TurnEndpoint:
    """An ASGI application for one API kind."""

    def __init__(
        self,
        kind: ApiKind,
        *,
        runner: TurnRunner,
        metrics: Metrics,
        watchdog: Watchdog,
        config: RouterConfig,
        engine_headers: bytes,
        receipts: ReceiptRing,
        tracing: Tracing | None,
    ) -> None:
        self._receipts = receipts
        self._tracing = tracing
        self._kind = kind
        self._runner = runner
        self._metrics = metrics
        self._limit = config.limits.body_bytes
        self._upload_s = config.timeouts.upload_s
        self._write_s = config.timeouts.client_write_s
        self._watchdog = watchdog
        self._engine_headers = engine_headers
        self._forward_authorization = config.auth.forward_authorization
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        client = Client(scope, receive, send, write_s=self._write_s, watchdog=self._watchdog)
        receipt, request_id = Receipt(), new_request_id()
        began = asyncio.get_running_loop().time()
        self.in_flight += 1
        try:
            await self._serve(client, receipt, request_id, scope.get(PRINCIPAL))
        except StoppingError as error:
            await self._cut(error, client, receipt, request_id)
        except RouterError as error:
            await self._refuse(error, client, receipt, request_id)
        except BrokenStreamError as error:
            receipt.outcome = "broken_stream"
            _log.warning("turn %s: stream broke: %s", request_id, error)
        except ClientGoneError:
            receipt.outcome = receipt.outcome if client.has_all else "client_gone"
        except Exception:
            _log.exception("turn %s: internal error", request_id)
            receipt.outcome = "internal"
            if client.reply.started:
                raise
            message = f"internal error; the router's log names it under turn {request_id}"
            await self._refuse(RouterError(message), client, receipt, request_id)
        finally:
            client.close()
            self.in_flight -= 1
            if receipt.streamed and client.reply.started:
                self._metrics.ttft_seconds.observe(client.reply.started_at - began, self._kind.name)
                receipt.delivered_s = client.reply.started_at - began
            self._metrics.turns.inc(self._kind.name, receipt.plan, receipt.outcome)
            self._receipts.add(self._kind.name, request_id, receipt)
            if receipt.trace is not None:
                receipt.trace.end(receipt.outcome, **_told(request_id, receipt))
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("turn %s: %s over %s: %s", request_id, receipt.plan, receipt.engines, receipt.outcome)

    async def _serve(self, client: Client, receipt: Receipt, request_id: str, caller: Principal | None) -> None:
        if self._tracing is not None:
            receipt.trace = self._tracing.turn(client.headers, self._kind.name)
        raw = await client.body(limit=self._limit, timeout_s=self._upload_s)
        check_media_type(client.headers)
        tenant = "" if caller is None else caller.tenant
        request = self._request(Body.parse(raw), client.headers, request_id, tenant, receipt.trace)
        receipt.streamed = request.stream
        work = self._runner.run(request, client.reply, receipt)
        await client.while_connected(work, last_frame=self._kind.last_frame)

    def _request(
        self, body: Body, headers: dict[bytes, bytes], request_id: str, tenant: str, trace: TurnTrace | None
    ) -> TurnRequest:
        return TurnRequest(
            kind=self._kind,
            body=body,
            tenant=tenant,
            request_id=request_id,
            conversation_id=_conversation_id(body, headers),
            headers=self._headers(headers, request_id),
            workload=_workload(headers),
            trace=trace,
        )

    def _headers(self, headers: dict[bytes, bytes], request_id: str) -> bytes:
        """Header lines for engines: ours, and of the client's the trace context and what configuration allows.

        With traces of our own engines hang below our spans, whose context each hop adds.
        """
        lines = b"x-request-id: %b\r\n%b" % (request_id.encode(), self._engine_headers)
        allowed = (*(() if self._tracing else _TRACE), *(_KEY if self._forward_authorization else ()))
        return lines + forwardable([(name, headers[name]) for name in allowed if name in headers])

    async def _cut(self, error: StoppingError, client: Client, receipt: Receipt, request_id: str) -> None:
        """The router stops before the answer is complete: say so in the way that is left."""
        if not client.reply.started:
            await self._refuse(error, client, receipt, request_id)
            return
        if client.has_all:
            await client.reply.end()
            return
        receipt.outcome = error.reason
        if receipt.streamed:
            errors = self._kind.errors
            await client.reply.end(
                errors.event(orjson.dumps(errors.body(error.type, error.message, None, error.status)))
            )

    async def _refuse(self, error: RouterError, client: Client, receipt: Receipt, request_id: str) -> None:
        receipt.outcome = error.reason
        if not isinstance(error, (EngineAnswerError, StoppingError)):  # these are counted and logged together
            _log.info("turn %s: %s: %s", request_id, error.reason, error.message)
        headers = {"x-request-id": request_id, "x-kvduplex-plan": receipt.plan}
        if isinstance(error, (BodyTooLargeError, RequestTimeoutError)):
            await client.refuse_unread(error, self._kind.errors, headers)
        else:
            await send_error(client.reply, error, self._kind.errors, headers)


def _told(request_id: str, receipt: Receipt) -> dict[str, str | int | None]:
    """What a span says of a turn."""
    return {
        "request_id": request_id,
        "plan": receipt.plan,
        "class": receipt.workload or None,
        "cached_tokens": receipt.cached_tokens,
        "predicted_tokens": receipt.predicted,
        "why_not_split": receipt.detail or None,
    }


def _workload(headers: dict[bytes, bytes]) -> str | None:
    """The class that the client names; what is no class's name is nobody's."""
    header = headers.get(b"x-kvduplex-class")
    return None if header is None else header.decode("ascii", "replace").strip()


def _conversation_id(body: Body, headers: dict[bytes, bytes]) -> str | None:
    if CONVERSATION_ID in body:
        found = checked_conversation_id(body.get(CONVERSATION_ID), place="conversation_id")
        if found is not None:
            return found
    header = headers.get(b"x-conversation-id")
    if header is None:
        return None
    return checked_conversation_id(header.decode("utf-8", "replace"), place="header X-Conversation-ID")
