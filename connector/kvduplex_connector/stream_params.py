"""Engine-side ASGI middleware: puts the decode engine's KV transfer parameters into a stream that would drop them.

A stock vLLM before 0.33 returns ``kv_transfer_params`` in whole replies only (vLLM 0.32 source,
``entrypoints/openai/chat_completion/serving.py`` and ``completion/serving.py``: the streaming generators never read the
field of the engine's last output). A router that serves streaming clients over such engines would never learn where the
KV lies. Loaded with ``vllm serve --middleware kvduplex_connector.stream_params.StreamParamsMiddleware``, this class
notes the parameters as the engine yields them and adds one frame just before ``[DONE]``::

    data: {"object":"kvduplex.kv_transfer_params","choices":[],"kv_transfer_params":{...}}

The leased connector does not need it: there the router names the lease itself.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Protocol

__all__ = ["FRAME_OBJECT", "StreamParamsMiddleware"]

FRAME_OBJECT = "kvduplex.kv_transfer_params"
_DONE = b"data: [DONE]"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class _EngineClient(Protocol):
    """The one method of vLLM's engine client that is watched."""

    def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]: ...


# One list a request. Serving code runs in tasks that copy the context, so they share the list and not its binding.
_current: ContextVar[list[dict[str, Any]] | None] = ContextVar("kvduplex_stream_params", default=None)


class StreamParamsMiddleware:
    """Adds the parameters' frame to event streams of requests that took part in a KV transfer."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._watched: _EngineClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything through; only generation requests over HTTP are looked at."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._watch(scope)
        seen: list[dict[str, Any]] = []
        token = _current.set(seen)
        try:
            await self._app(scope, receive, _Tail(send, seen))
        finally:
            _current.reset(token)

    def _watch(self, scope: Scope) -> None:
        """Wrap the engine client once; it exists only after start-up, so not in the constructor."""
        client = getattr(scope["app"].state, "engine_client", None)
        if client is not None and client is not self._watched:
            client.generate = _noting(client.generate)
            self._watched = client


class _Tail:
    """ASGI ``send`` that adds the frame in front of the end mark of an event stream."""

    def __init__(self, send: Send, seen: list[dict[str, Any]]) -> None:
        self._send = send
        self._seen = seen
        self._stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            self._stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif self._stream and self._seen:
            message = self._with_frame(message)
        await self._send(message)

    def _with_frame(self, message: Message) -> Message:
        body: bytes = message.get("body", b"")
        at = body.rfind(_DONE)
        # A client can write the mark into a prompt that is echoed, but never at the start of an event: the server
        # escapes line breaks inside its JSON.
        if at < 0 or (at and body[at - 1 : at] != b"\n"):
            return message
        # Several sub-requests (n > 1, list prompts) have several sets of blocks; a frame can name one, so none is sent.
        frame = self._frame(self._seen[0]) if len(self._seen) == 1 else b""
        self._seen.clear()
        return {**message, "body": body[:at] + frame + body[at:]}

    @staticmethod
    def _frame(params: dict[str, Any]) -> bytes:
        event = {"object": FRAME_OBJECT, "choices": [], "kv_transfer_params": params}
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _noting(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Wrap an engine client's ``generate`` so that parameters in its outputs reach the current request's list."""

    async def noting(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        seen = _current.get()
        # Closing matters: an aborted client closes this generator, and the engine aborts only when its own is closed.
        async with aclosing(generate(*args, **kwargs)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if seen is not None and getattr(output, "kv_transfer_params", None):
                    seen.append(output.kv_transfer_params)
                yield output

    return noting
