"""What a streamed chat answer says, and when: first token, gaps between tokens, text, counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvduplex_bench.multiturn.wire import BrokenExchangeError, Exchange

__all__ = ["Messages", "Reply", "chat_body", "read_reply"]

Messages = list[dict[str, str]]

_OK = 200
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer.

    Attributes:
        text: What was generated.
        ttft_s: From the request's write to the read that brought the first generated text.
        gaps_s: Between the reads that brought each further part of the text; 0 when two came in one read.
        e2e_s: From the request's write to the read that brought the last generated text.
        connect_s: Seconds that connecting took before the write; in none of the others.
        prompt_tokens: As the engine counted; 0 when it did not say.
        answer_tokens: As the engine counted; the parts of the text when it did not say.
        cached_tokens: Prompt tokens that were not computed, from ``x-kvduplex-cached-tokens`` or the usage; None when
            nobody said.
        plan: ``x-kvduplex-plan``; empty when the router did not say.
    """

    text: str
    ttft_s: float
    gaps_s: tuple[float, ...]
    e2e_s: float
    connect_s: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None
    plan: str


def chat_body(
    model: str, messages: Messages, *, answer_tokens: int, conversation: str | None = None, **more: Any
) -> bytes:
    """A request for exactly `answer_tokens` greedy tokens, streamed.

    Ignoring the end-of-turn token makes vLLM go on after it; forbidding it keeps it out of the answer, whose text lacks
    it: sent back as history it would encode to other tokens, and nothing behind it could be reused.

    Args:
        model: Name of the model.
        messages: The history and the new message.
        answer_tokens: Tokens to generate.
        conversation: Sent as ``conversation_id``; None leaves it out.
        more: Further members, or other values for these.
    """
    value: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "min_tokens": answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if conversation is not None:
        value["conversation_id"] = conversation
    merged = {name: given for name, given in (value | more).items() if given is not None}
    return json.dumps(merged, ensure_ascii=False, separators=(",", ":")).encode()


def read_reply(answer: Exchange) -> Reply:
    """Take a streamed answer apart.

    Raises:
        BrokenExchangeError: It is an error, carries one, or holds no text.
    """
    if answer.status != _OK:
        raise BrokenExchangeError(f"answered {answer.status}: {_shown(answer.body)}")
    stamps: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    for at, data in _events(answer.pieces):
        if data == b"[DONE]":
            break
        chunk = _object(data)
        if "error" in chunk:
            raise BrokenExchangeError(f"its stream ended in an error: {_shown(data)}")
        usage = chunk.get("usage") or usage
        if text := _text(chunk):
            stamps.append(at)
            texts.append(text)
    if not stamps:
        raise BrokenExchangeError(f"its stream held no text: {_shown(answer.body)}")
    return Reply(
        text="".join(texts),
        ttft_s=stamps[0] - answer.sent_at,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(stamps)),
        e2e_s=stamps[-1] - answer.sent_at,
        connect_s=answer.connect_s,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        answer_tokens=int(usage.get("completion_tokens") or len(stamps)),
        cached_tokens=_cached(answer.headers, usage),
        plan=answer.headers.get("x-kvduplex-plan", ""),
    )


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Data of each server-sent event, with the time of the read that completed it."""
    rest = b""
    for at, piece in pieces:
        # A read may end within a separator; what is left then begins with its second half.
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            if data := _data(event):
                yield at, data
    if pieces and (data := _data(rest)):
        yield pieces[-1][0], data


def _data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def _object(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise BrokenExchangeError(f"its stream holds an event that is not JSON: {_shown(data)}") from error
    if not isinstance(chunk, dict):
        raise BrokenExchangeError(f"its stream holds an event that is not an object: {_shown(data)}")
    return chunk


def _text(chunk: dict[str, Any]) -> str:
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return str(delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or "")


def _cached(headers: dict[str, str], usage: dict[str, Any]) -> int | None:
    if (said := headers.get("x-kvduplex-cached-tokens", "")).isdigit():
        return int(said)
    told = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return None if told is None else int(told)


def _shown(body: bytes) -> str:
    return body[:_SHOWN].decode(errors="replace")
