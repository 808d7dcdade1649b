"""Plays a trace against a router over HTTP: conversations with their gaps, or a fixed number of clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from kvduplex_bench.routing.client import Ask, Reply
from kvduplex_bench.traces.model import Conversation, Trace
from kvduplex_bench.traces.text import Writer

__all__ = ["ANSWER_WITHIN_S", "Playback", "Played"]

ANSWER_WITHIN_S: Final = 300.0
"""Seconds that a client waits for a complete answer, on a clock that time scales above 1 slow down."""


@dataclass(frozen=True, slots=True)
class Played:
    """One turn as the client saw it, in seconds of the profile.

    Attributes:
        kind: Workload class.
        asked: When, from the start of the playback.
        ttft_s: To the first content; 0 when it failed.
        e2e_s: To the end.
        prompt_tokens: As the answer counted.
        cached_tokens: As the answer counted; None when it did not.
        output_tokens: As the answer counted.
        status: HTTP status.
        error: What went wrong.
        plan: The plan that the router named.
        number: Of the turn in its conversation; 0 is the first.
    """

    kind: str
    asked: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    status: int
    error: str
    plan: str = ""
    number: int = 0

    @property
    def ended(self) -> float:
        """When it was complete or broke, from the start of the playback."""
        return self.asked + self.e2e_s


@dataclass(slots=True)
class Playback:
    """One playback.

    Attributes:
        trace: What to play.
        writer: Writes its content out.
        ask: Sends a request to the router.
        model: Model name asked for.
        rate: Conversations a second of the profile; of no account for a closed trace.
        time_scale: Seconds of the clock for one second of the profile.
        clients: Clients of a closed trace.
        seconds: After so many no further turn is asked, those of conversations under way neither.
        progress: Told the number of answers so far.
    """

    trace: Trace
    writer: Writer
    ask: Ask
    model: str
    rate: float = 1.0
    time_scale: float = 1.0
    clients: int = 64
    seconds: float = float("inf")
    progress: Callable[[int], None] = lambda _count: None
    results: list[Played] = field(default_factory=list)
    _began: float = 0.0

    async def run(self) -> list[Played]:
        """Play to the end; returns every turn that was asked."""
        self._began = time.perf_counter()
        if self.trace.closed:
            waiting = iter(self.trace.conversations)
            await asyncio.gather(*(self._client(waiting) for _ in range(self.clients)))
        else:
            await asyncio.gather(*(self._scheduled(each) for each in self.trace.conversations))
        return self.results

    async def run_while(self, deed: Callable[[], Awaitable[None]], every_s: float) -> list[Played]:
        """Play, and do `deed` every so many seconds of the clock as long as new turns are asked.

        A deed that takes longer than that is followed by the next at once.
        """
        playing = asyncio.create_task(self.run())
        due, last = every_s, self.seconds * self.time_scale
        try:
            while due < last:
                await asyncio.wait([playing], timeout=max(0.0, due - self.elapsed_s()))
                if playing.done():
                    break
                await deed()
                due = max(due + every_s, self.elapsed_s())
            return await playing
        finally:
            playing.cancel()

    def elapsed_s(self) -> float:
        """Seconds of the clock since the playback began; 0 before."""
        return time.perf_counter() - self._began if self._began else 0.0

    async def _client(self, waiting: Iterator[Conversation]) -> None:
        for conversation in waiting:
            await self._converse(conversation)

    async def _scheduled(self, conversation: Conversation) -> None:
        due = self._began + conversation.start / self.rate * self.time_scale
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await self._converse(conversation)

    async def _converse(self, conversation: Conversation) -> None:
        messages: list[bytes] = []
        headers = {
            "x-conversation-id": conversation.id, "x-session-id": conversation.id,
            "x-kvduplex-class": conversation.kind,
        }  # fmt: skip
        for number, turn in enumerate(conversation.turns):
            if number:
                await asyncio.sleep(turn.gap_s * self.time_scale)
            if self.elapsed_s() >= self.seconds * self.time_scale:
                return
            messages += [self.writer.message(segment) for segment in turn.new]
            body = self._body(messages, turn.output_tokens)
            reply = await self.ask(body, headers, ANSWER_WITHIN_S * max(1.0, self.time_scale))
            text = self._note(conversation.kind, number, reply)
            if text is None:
                return
            messages.append(json.dumps({"role": "assistant", "content": text}).encode())

    def _body(self, messages: list[bytes], output_tokens: int) -> bytes:
        tail = b'],"max_tokens":%d,"temperature":0,"stream":true,"stream_options":{"include_usage":true}}'
        return b'{"model":"%b","messages":[' % self.model.encode() + b",".join(messages) + tail % output_tokens

    def _note(self, kind: str, number: int, reply: Reply) -> str | None:
        """Keep what came; the answer's text, or None when there is none to go on from."""
        text, usage, error = _read(reply)
        counted = usage or {}
        details = counted.get("prompt_tokens_details") or {}
        scale = self.time_scale
        self.results.append(
            Played(
                kind,
                (reply.asked - self._began) / scale if reply.asked else 0.0,
                (reply.first - reply.asked) / scale if reply.first else 0.0,
                (reply.ended - reply.asked) / scale if reply.ended else 0.0,
                int(counted.get("prompt_tokens", 0)), details.get("cached_tokens"),
                int(counted.get("completion_tokens", 0)), reply.status, error, reply.plan, number,
            )
        )  # fmt: skip
        self.progress(len(self.results))
        return None if error else text


def _read(reply: Reply) -> tuple[str, dict[str, Any] | None, str]:
    """Text, usage and error of an answer."""
    if not reply.good:
        return "", None, reply.error or f"status {reply.status}"
    parts: list[str] = []
    usage: dict[str, Any] | None = None
    for line in bytes(reply.body).split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        value = json.loads(line[6:])
        if "error" in value:
            return "", None, "error in the stream"
        if choices := value.get("choices"):
            parts.append(choices[0]["delta"].get("content") or "")
        usage = value.get("usage") or usage
    if b"data: [DONE]" not in reply.body:
        return "", None, "the stream ended without [DONE]"
    return "".join(parts), usage, ""
