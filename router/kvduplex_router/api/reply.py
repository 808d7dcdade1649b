"""Answers to a client over ASGI, and the OpenAI form of every error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from kvduplex_router.api.protocol import ClientProtocol
from kvduplex_router.errors import EngineAnswerError, RouterError
from kvduplex_router.http.watchdog import NEVER
from kvduplex_router.requests.kinds import ErrorStyle

__all__ = ["Receive", "Reply", "Scope", "Send", "rendered_error", "send_error", "send_json"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Reply:
    """A `kvduplex_router.pd.request.Sink` over an ASGI send, watched so that a client that stops reading is let go.

    Args:
        send: The ASGI send.
        write_s: Seconds a client may take to make room for more.
        on_stalled: Called when it takes longer, or longer than `expect` said.
        connection: The connection below, when it is known.

    Attributes:
        started: The status was sent.
        started_at: When, in the event loop's time.
        ended: The last part was sent.
        latest: The part of a stream that was sent last.
    """

    __slots__ = (
        "_connection",
        "_loop",
        "_on_stalled",
        "_send",
        "_write_s",
        "deadline",
        "ended",
        "latest",
        "started",
        "started_at",
    )

    def __init__(
        self,
        send: Send,
        *,
        write_s: float = NEVER,
        on_stalled: Callable[[], None] | None = None,
        connection: ClientProtocol | None = None,
    ) -> None:
        self._send = send
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._write_s = write_s
        self._on_stalled = on_stalled
        self.deadline = NEVER
        self.started = False
        self.started_at = 0.0
        self.ended = False
        self.latest = b""

    async def start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        """Send status and headers of an answer whose length is not known."""
        self.started = True
        self.started_at = self._loop.time()
        await self._send({"type": "http.response.start", "status": status, "headers": _head(content_type, headers)})

    async def send(self, data: bytes) -> None:
        """Send a part of the body, waiting while the client lags."""
        self.deadline = self._loop.time() + self._write_s
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.latest = data
        self.deadline = NEVER

    @property
    def takes_now(self) -> bool:
        """Whether the body has begun and a part of it can be sent without a wait."""
        return self.started and self._connection is not None and self._connection.takes_chunks

    def send_now(self, data: bytes) -> None:
        """Send a part of the body while `takes_now`."""
        if self._connection is not None:
            self._connection.write_chunk(data)
            self.latest = data

    async def end(self, data: bytes = b"") -> None:
        """Send the last part."""
        self.deadline = self._loop.time() + self._write_s
        self.ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        self.deadline = NEVER

    async def whole(self, status: int, content_type: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer in one piece."""
        await self.start(status, content_type, {**headers, "content-length": str(len(body))})
        await self.end(body)

    def expect(self, seconds: float) -> None:
        """Set a deadline for what the client is to do next."""
        self.deadline = self._loop.time() + seconds

    def on_deadline(self) -> None:
        """The client has not done its part for too long."""
        self.deadline = NEVER
        if self._on_stalled is not None:
            self._on_stalled()


def _head(content_type: str, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    pairs = [(b"content-type", content_type.encode("latin-1"))]
    pairs.extend((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
    return pairs


async def send_json(reply: Reply, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
    """Send a JSON value."""
    await reply.whole(status, "application/json", orjson.dumps(value), headers or {})


async def send_error(reply: Reply, error: RouterError, style: ErrorStyle, headers: Mapping[str, str]) -> None:
    """Send an error as the API spells it; an engine's own error object is passed on as it is."""
    status, body, more = rendered_error(error, style)
    await reply.whole(status, "application/json", body, {**headers, **more})


def rendered_error(error: RouterError, style: ErrorStyle) -> tuple[int, bytes, Mapping[str, str]]:
    """Status, JSON body and extra headers of an error."""
    if isinstance(error, EngineAnswerError):
        made = style.body(error.engine_type, error.message, None, error.engine_status)
        return error.engine_status, error.body or orjson.dumps(made), error.headers()
    body = style.body(error.type, error.message, error.param, error.reason)
    return error.status, orjson.dumps(body), error.headers()
