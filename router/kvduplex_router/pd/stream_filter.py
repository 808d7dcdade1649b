"""What a stream's frames mean to the router, and what of them the client must not see.

Most frames are looked at with a few substring searches and passed on as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from kvduplex_router.conversations.answer import Answer, AnswerCollector
from kvduplex_router.http.sse import event_data, frames
from kvduplex_router.pd.usage import NO_USAGE, PromptUsage, may_name_cached, with_prompt_usage
from kvduplex_router.requests.fields import KV_PARAMS

__all__ = ["StreamFilter", "decoded_frames"]

_OWNED: Final = b"transfer_params"
_OWNED_NAMES: Final = (KV_PARAMS, "ec_transfer_params")
_ERROR: Final = re.compile(rb'\{\s*"error"\s*:|"type"\s*:\s*"error"')
_TAIL_BYTES: Final = 64 * 1024
_NESTED: Final = ("response", "message")
_USAGE: Final = b'"usage":{'


class StreamFilter:
    """Takes pieces of whole frames and returns what goes to the client.

    Args:
        ends: Byte strings one of which a complete stream carries.
        usage: What the prefill hop said, when there was one.
        collector: Takes the chunks when the answer's digest is wanted.

    Attributes:
        params: The decode engine's transfer parameters as JSON, once seen.
    """

    def __init__(
        self, *, ends: tuple[bytes, ...], usage: PromptUsage | None, collector: AnswerCollector | None
    ) -> None:
        self._ends = ends
        self._usage = usage
        self._collector = collector
        self._tail: list[bytes] = []
        self._tail_size = 0
        self.params: bytes | None = None

    def feed(self, block: bytes) -> bytes:
        """Look at whole frames and return what the client gets of them; may be empty."""
        self._tail.append(block)
        self._tail_size += len(block)
        if self._tail_size > 2 * _TAIL_BYTES:
            self._shorten()
        if self._collector is not None:
            self._collector.frames(block)
        if _OWNED in block or (self._usage is not None and may_name_cached(block)):
            return b"".join([self._frame(frame) for frame in frames(block)])
        return block

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; worked out from the last frames when asked, once at the end."""
        tail = b"".join(self._tail)
        return any(end in tail for end in self._ends)

    @property
    def failed(self) -> bool:
        """Whether the engine reported an error inside the stream, at its end as engines do."""
        return _ERROR.search(b"".join(self._tail)) is not None

    @property
    def counted(self) -> PromptUsage:
        """Token counts as the engine gave them near the stream's end, when the client asked for them."""
        for block in reversed(self._tail):
            if (at := block.rfind(_USAGE)) >= 0:
                start = block.rfind(b"\n\n", 0, at) + 1
                chunk = _decoded(block[start : block.find(b"\n\n", at)].strip())
                return NO_USAGE if chunk is None else PromptUsage.parse(_usage(chunk))
        return NO_USAGE

    def answer(self) -> Answer | None:
        """What was generated; None when it was not collected or reuse must not rest on it."""
        return None if self._collector is None else self._collector.result()

    def _shorten(self) -> None:
        tail = b"".join(self._tail)[-_TAIL_BYTES:]
        self._tail = [tail]
        self._tail_size = len(tail)

    def _frame(self, frame: bytes) -> bytes:
        if _OWNED in frame:
            frame = self._without_params(frame)
        if self._usage is not None:
            frame = with_prompt_usage(frame, self._usage)
        return frame

    def _without_params(self, frame: bytes) -> bytes:
        chunk = _decoded(frame)
        places = (
            [] if chunk is None else [chunk, *(chunk[name] for name in _NESTED if isinstance(chunk.get(name), dict))]
        )
        found = {name: value for place in places for name in _OWNED_NAMES if (value := place.pop(name, None))}
        if chunk is None or not found:
            return frame  # null, or only in text
        if KV_PARAMS in found:
            self.params = orjson.dumps(found[KV_PARAMS])
        if "choices" in chunk and not chunk["choices"] and not chunk.get("usage"):
            return b""
        return _rebuilt(frame, chunk)


def _usage(chunk: dict[str, Any]) -> object:
    return chunk.get("usage") or next((chunk[n].get("usage") for n in _NESTED if isinstance(chunk.get(n), dict)), None)


def decoded_frames(block: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects in the frames of a block."""
    return filter(None, map(_decoded, frames(block)))


def _decoded(frame: bytes) -> dict[str, Any] | None:
    data = event_data(frame)
    if data is None or not data.startswith(b"{"):
        return None
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return chunk if isinstance(chunk, dict) else None


def _rebuilt(frame: bytes, chunk: dict[str, Any]) -> bytes:
    """The frame with other data: event name, id and comments stay."""
    lines = [line for line in frame.splitlines() if line and not line.startswith(b"data")]
    return b"\n".join([*lines, b"data: " + orjson.dumps(chunk), b"", b""])
