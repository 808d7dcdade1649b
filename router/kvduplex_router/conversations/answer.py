"""What a decode engine generated, reduced to a digest that a client's later history can be held against.

Used with stock engines only. Anything that a chat template may render differently from what was generated (reasoning,
several choices, content in parts) yields no digest, hence no reuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import orjson

from kvduplex_router.conversations.keys import scope_digest

__all__ = ["Answer", "AnswerCollector", "answer_digest", "text_digest"]

_KNOWN: Final = frozenset({"role", "content", "tool_calls", "reasoning", "reasoning_content"})


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer.

    Attributes:
        digest: `answer_digest` of a chat message, or `text_digest`.
        length: Characters of a text answer; 0 for chat.
    """

    digest: bytes
    length: int = 0


def text_digest(text: str) -> bytes:
    """Digest of generated text."""
    return scope_digest(b"text", text.encode("utf-8", "surrogatepass"))


def answer_digest(message: object) -> bytes | None:
    """Digest of an assistant message as a client sends it; None when it cannot equal plain generated output."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return None
    if any(message[name] for name in message if name not in _KNOWN):
        return None
    if message.get("reasoning") or message.get("reasoning_content"):
        return None
    content = message.get("content")
    calls = _calls(message.get("tool_calls"))
    if calls is None or not (content is None or isinstance(content, str)):
        return None
    return _digest(content or "", calls)


def _calls(value: object) -> list[str] | None:
    if not value:
        return []
    if not isinstance(value, list):
        return None
    parts: list[str] = []
    for call in value:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return None
        parts += [str(call.get("id") or ""), str(function.get("name") or ""), str(function.get("arguments") or "")]
    return parts


def _digest(content: str, calls: list[str]) -> bytes:
    return scope_digest(b"chat", *(part.encode("utf-8", "surrogatepass") for part in (content, *calls)))


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


_ONE_CHOICE: Final = b'"choices":[{'
_CHAT: Final = re.compile(
    rb'"choices":\[\{"index":0,"delta":\{(?:"role":"assistant"(?=\}|,),?)?(?:"content":"((?:[^"\\]|\\.)*)")?\}'
)
_TEXT: Final = re.compile(rb'"choices":\[\{"index":0,"text":"((?:[^"\\]|\\.)*)"')
_AT_ONCE: Final = 64 * 1024


class AnswerCollector:
    """Puts an answer together from a stream's frames, or takes a whole reply.

    Frames are looked at many at a time. Those in which one choice grows by text and by nothing else, nearly all, are
    read by one search; whatever has another shape is decoded.

    Args:
        decode: Decodes the frames of a block.
    """

    def __init__(self, decode: Callable[[bytes], Iterable[Mapping[str, Any]]]) -> None:
        self._decode = decode
        self._blocks: list[bytes] = []
        self._size = 0
        self._text: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._chat = False
        self._doubtful = False

    def whole(self, reply: Mapping[str, Any]) -> None:
        """Take a reply that was not streamed."""
        for choice in _choices(reply):
            message = choice.get("message")
            if isinstance(message, Mapping):
                self._delta({**message, "tool_calls": _indexed(message.get("tool_calls"))})
            self._completion(choice)

    def frames(self, block: bytes) -> None:
        """Take whole frames of a stream."""
        self._blocks.append(block)
        self._size += len(block)
        if self._size > _AT_ONCE:
            self._look()

    def chunk(self, chunk: Mapping[str, Any]) -> None:
        """Take one decoded chunk of a stream."""
        for choice in _choices(chunk):
            delta = choice.get("delta")
            if isinstance(delta, Mapping):
                self._delta(delta)
            self._completion(choice)

    def result(self) -> Answer | None:
        """The answer; None when reuse must not rest on it."""
        self._look()
        if self._doubtful:
            return None
        text = "".join(self._text)
        if not self._chat:
            return Answer(text_digest(text), len(text))
        calls = [
            part for _, call in sorted(self._calls.items()) for part in (call.id, call.name, "".join(call.arguments))
        ]
        return Answer(_digest(text, calls))

    def _look(self) -> None:
        """Read the frames taken so far."""
        block = b"".join(self._blocks)
        self._blocks.clear()
        self._size = 0
        if not block or self._doubtful:
            return
        for chat, pattern in ((True, _CHAT), (False, _TEXT)):
            found = pattern.findall(block)
            if found and len(found) == block.count(_ONE_CHOICE):
                self._chat = self._chat or chat
                self._join(found)
                return
        for chunk in self._decode(block):
            self.chunk(chunk)

    def _join(self, pieces: list[bytes]) -> None:
        """Decode pieces of JSON text; joined first, for that is the same."""
        try:
            self._text.append(orjson.loads(b'"' + b"".join(pieces) + b'"'))
        except orjson.JSONDecodeError:
            self._doubtful = True

    def _completion(self, choice: Mapping[str, Any]) -> None:
        if choice.get("index", 0) != 0:
            self._doubtful = True
        if isinstance(text := choice.get("text"), str):
            self._text.append(text)

    def _delta(self, delta: Mapping[str, Any]) -> None:
        self._chat = True
        if delta.get("reasoning") or delta.get("reasoning_content"):
            self._doubtful = True
        if isinstance(content := delta.get("content"), str):
            self._text.append(content)
        for call in delta.get("tool_calls") or ():
            self._call(call)

    def _call(self, delta: object) -> None:
        if not isinstance(delta, Mapping) or not isinstance(delta.get("index"), int):
            self._doubtful = True
            return
        call = self._calls.setdefault(delta["index"], _Call())
        function = delta.get("function") or {}
        call.id = call.id or str(delta.get("id") or "")
        call.name += str(function.get("name") or "")
        call.arguments.append(str(function.get("arguments") or ""))


def _choices(reply: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = reply.get("choices")
    return [choice for choice in choices if isinstance(choice, Mapping)] if isinstance(choices, list) else []


def _indexed(calls: object) -> list[dict[str, Any]]:
    return (
        [{**call, "index": i} for i, call in enumerate(calls) if isinstance(call, Mapping)]
        if isinstance(calls, list)
        else []
    )
