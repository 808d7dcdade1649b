"""The answering hop: a whole reply or a stream, from a decode engine or from one that serves the request alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import orjson

from kvduplex_router.clock import Clock
from kvduplex_router.conversations.answer import Answer, AnswerCollector
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.http.request import post_head, post_request
from kvduplex_router.http.sse import FrameBuffer, FrameTooLargeError
from kvduplex_router.pd.hop import Hop, HopFailedError, open_hop, reply_members
from kvduplex_router.pd.request import Sink, TurnRequest
from kvduplex_router.pd.stream_filter import StreamFilter, decoded_frames
from kvduplex_router.pd.usage import NO_USAGE, PromptUsage, with_prompt_usage
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.fields import KV_PARAMS, OWNED
from kvduplex_router.requests.kinds import ErrorStyle
from kvduplex_router.telemetry.metrics import Metrics

__all__ = ["AnswerHop", "Answered", "BrokenStreamError"]

_EVENT_STREAM: Final = "text/event-stream"
_DONE: Final = b"data: [DONE]"
_BAD_GATEWAY: Final = 502
_NOTHING: Final = frozenset({b"null"})


class BrokenStreamError(Exception):
    """A stream broke after the client had been sent a part of it; the client was told so in the stream."""


class Answered(msgspec.Struct, frozen=True):
    """A complete answer was passed on.

    Attributes:
        params: The engine's transfer parameters as JSON, unchecked; None when it sent none.
        answer: What it generated, when that was collected.
        failed: The engine reported an error inside the stream.
        usage: Token counts as the answering engine reported them.
    """

    params: bytes | None
    answer: Answer | None
    failed: bool = False
    usage: PromptUsage = NO_USAGE


class AnswerHop:
    """Sends turns to the engine that answers, and passes the answer on."""

    def __init__(self, *, clock: Clock, answer_limit: int, frame_limit: int, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._answer_limit = answer_limit
        self._frame_limit = frame_limit

    async def run(
        self,
        request: TurnRequest,
        engine: Engine,
        body: bytes,
        sink: Sink,
        *,
        headers: Mapping[str, str],
        usage: PromptUsage | None,
        collect: bool,
        on_first: Callable[[], None] = lambda: None,
        on_left: Callable[[Answered], None] = lambda _: None,
    ) -> Answered:
        """Pass the engine's answer on to `sink`.

        Args:
            request: The turn.
            engine: Where.
            body: The engine's request body.
            sink: The client.
            headers: Headers for the client.
            usage: What the prefill hop counted; None when this engine computes the prompt itself.
            collect: Work out what was generated.
            on_first: Called when the answer begins.
            on_left: Called when the client leaves with a complete stream, as openai-python does at ``[DONE]``.

        Raises:
            HopFailedError: The engine failed before the client was sent anything.
            EngineAnswerError: The engine refused the request for the client's sake.
            BrokenStreamError: It failed later.
        """
        name = "decode" if usage is not None else "whole"
        with request.hop(name, engine) as lines:
            message = post_request(post_head(engine.address.origin, request.kind.path), lines, body)
            began = self._clock()
            hop = await open_hop(engine, message, self._clock, resend=usage is None)
            self._metrics.hop_seconds.observe(self._clock() - began, name)
            return await self._pass(request, hop, sink, headers, usage, on_first, on_left, collect=collect)

    async def _pass(
        self,
        request: TurnRequest,
        hop: Hop,
        sink: Sink,
        headers: Mapping[str, str],
        usage: PromptUsage | None,
        on_first: Callable[[], None],
        on_left: Callable[[Answered], None],
        *,
        collect: bool,
    ) -> Answered:
        collector = AnswerCollector(decoded_frames) if collect else None
        try:
            if hop.response.content_type == _EVENT_STREAM:
                buffer = FrameBuffer(self._frame_limit)
                relay = _Relay(hop, sink, headers, buffer, request.kind.errors, on_first=on_first, on_left=on_left)
                return await relay.run(StreamFilter(ends=request.kind.stream_ends, usage=usage, collector=collector))
            if request.stream:
                raise hop.unusable(f"answered {hop.response.content_type or 'no content type'} instead of a stream")
            return await self._whole(hop, sink, headers, usage, collector)
        finally:
            hop.close()

    async def _whole(
        self,
        hop: Hop,
        sink: Sink,
        headers: Mapping[str, str],
        usage: PromptUsage | None,
        collector: AnswerCollector | None,
    ) -> Answered:
        raw = await hop.read_all(self._answer_limit)
        members = reply_members(hop, raw)
        owned = {name: bytes(members[name]) for name in OWNED if name in members}
        given = owned.get(KV_PARAMS, b"null")
        params = None if given == b"null" else given
        shown = raw if set(owned.values()) <= _NOTHING else Body(members, 0).render(without=OWNED)
        if usage is not None:
            shown = with_prompt_usage(shown, usage)
        await sink.whole(200, "application/json", shown, headers)
        counted = PromptUsage.of_member(members.get("usage"))
        if collector is None or params is None:
            return Answered(params, None, usage=counted)
        collector.whole(orjson.loads(raw))
        return Answered(params, collector.result(), usage=counted)


class _Relay:
    """Passes one stream on, frame by frame; the client is sent nothing before the first whole frame."""

    def __init__(
        self,
        hop: Hop,
        sink: Sink,
        headers: Mapping[str, str],
        buffer: FrameBuffer,
        errors: ErrorStyle,
        *,
        on_first: Callable[[], None],
        on_left: Callable[[Answered], None],
    ) -> None:
        self._on_first = on_first
        self._on_left = on_left
        self._hop = hop
        self._sink = sink
        self._headers = headers
        self._buffer = buffer
        self._errors = errors
        self._copying = False

    async def run(self, stream: StreamFilter) -> Answered:
        self._hop.response.consumer = lambda data: self._pass_now(stream, data)
        try:
            await self._copy(stream)
        except HopFailedError as error:
            if not stream.finished:
                await self._broken(error)
        except asyncio.CancelledError:
            if stream.finished:
                self._on_left(_answered(stream))
            raise
        self._hop.succeed()
        await self._sink.end()
        return _answered(stream)

    def _pass_now(self, stream: StreamFilter, data: bytes) -> bool:
        """Pass a part on without a task's turn, the usual case by far; what cannot be is left to `_copy`.

        While `_copy` sends, everything is left to it: parts must not overtake each other.
        """
        if self._copying or not self._sink.takes_now:
            return False
        try:
            block = self._buffer.feed(data)
        except FrameTooLargeError:
            return False  # `_copy` meets it again
        if block and (shown := stream.feed(block)):
            self._sink.send_now(shown)
        return True

    async def _copy(self, stream: StreamFilter) -> None:
        while data := await self._hop.read():
            self._copying = True
            try:
                block = self._buffer.feed(data)
            except FrameTooLargeError as error:
                raise self._hop.unusable(str(error)) from error
            if block and (shown := stream.feed(block)):
                await self._send(shown)
            self._copying = False
        rest = self._buffer.rest
        if rest.strip() == _DONE:
            await self._send(rest)
        elif not stream.finished and not stream.failed:
            raise self._hop.unusable("ended its stream before the answer was complete")

    async def _send(self, data: bytes) -> None:
        if not self._sink.started:
            self._on_first()
            await self._sink.start(200, "text/event-stream; charset=utf-8", self._headers)
        await self._sink.send(data)

    async def _broken(self, error: HopFailedError) -> None:
        if not self._sink.started:
            raise error
        message = "the engine's answer broke off; what arrived before this is incomplete"
        value = orjson.dumps(self._errors.body("upstream_error", message, None, _BAD_GATEWAY))
        await self._sink.end(self._errors.event(value))
        raise BrokenStreamError(str(error)) from error


def _answered(stream: StreamFilter) -> Answered:
    """What came of a stream that ended."""
    if stream.failed:
        return Answered(None, None, failed=True)
    answer = stream.answer() if stream.params is not None else None
    return Answered(stream.params, answer, usage=stream.counted)
