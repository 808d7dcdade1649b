"""Recorded traces in public formats.

* Mooncake-style JSON lines, one request a line: ``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids":
  [...]}``, each hash id naming 512 tokens of content.
* ShareGPT-style JSON: a list of ``{"id", "conversations": [{"from": "human" | "gpt", "value": text}, ...]}``.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvduplex_bench.errors import BenchError
from kvduplex_bench.traces.model import Conversation, Segment, Trace, Turn

__all__ = ["TraceFormatError", "load_trace"]

_HASHED_TOKENS: Final = 512
_CHARACTERS_PER_TOKEN: Final = 4
_READING_S: Final = 15.0


class TraceFormatError(BenchError):
    """A trace file is not of a known format; the message names file and line."""


class _Request(msgspec.Struct):
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int]


class _Said(msgspec.Struct):
    sender: str = msgspec.field(name="from")
    value: str


class _Shared(msgspec.Struct):
    conversations: list[_Said]
    id: str = ""


def load_trace(path: Path, *, limit: int = 0, seed: int = 1) -> Trace:
    """Read a trace.

    Args:
        path: A ``.jsonl`` file is Mooncake-style, a ``.json`` file ShareGPT-style.
        limit: Conversations read; 0 is all.
        seed: Of arrival times and gaps where the format has none.

    Raises:
        TraceFormatError: The file cannot be read as that.
    """
    try:
        if path.suffix == ".jsonl":
            return _mooncake(path, limit)
        return _sharegpt(path, limit, seed)
    except OSError as error:
        raise TraceFormatError(f"trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceFormatError(f"trace {path} is not UTF-8 text: {error}") from error


def _mooncake(path: Path, limit: int) -> Trace:
    decoder = msgspec.json.Decoder(_Request)
    requests: list[_Request] = []
    with path.open("rb") as lines:
        for number, line in enumerate(itertools.islice(lines, limit or None), 1):
            if not line.strip():
                continue
            try:
                requests.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise TraceFormatError(f"trace {path}, line {number}: {error}") from error
    if not requests:
        raise TraceFormatError(f"trace {path} is empty")
    requests.sort(key=lambda each: each.timestamp)
    begin = requests[0].timestamp
    span_s = max((requests[-1].timestamp - begin) / 1000, 1e-9)
    rate = len(requests) / span_s
    placed = (
        Conversation(f"line-{n}", "replay", (each.timestamp - begin) / 1000 * rate, (_hashed_turn(each, n),))
        for n, each in enumerate(requests)
    )
    return Trace(path.stem, tuple(placed), f"replay of {path.name}, {rate:.2f} requests a second as recorded")


def _hashed_turn(request: _Request, number: int) -> Turn:
    left, segments = request.input_length, []
    for hash_id in request.hash_ids:
        if left <= 0:
            break
        segments.append(Segment("user", f"hash-{hash_id}", min(left, _HASHED_TOKENS)))
        left -= _HASHED_TOKENS
    if left > 0:
        segments.append(Segment("user", f"line-{number}-rest", left))
    return Turn(0.0, tuple(segments), request.output_length)


def _sharegpt(path: Path, limit: int, seed: int) -> Trace:
    try:
        shared = msgspec.json.decode(path.read_bytes(), type=list[_Shared])
    except msgspec.DecodeError as error:
        raise TraceFormatError(f"trace {path}: {error}") from error
    chance = random.Random(seed)
    at, placed = 0.0, []
    for number, each in enumerate(shared):
        if turns := tuple(_spoken_turns(each, chance)):
            at += chance.expovariate(1.0)
            placed.append(Conversation(f"{each.id or 'shared'}-{number}", "chat", at, turns))
        if limit and len(placed) >= limit:
            break
    if not placed:
        raise TraceFormatError(f"trace {path} has no conversation with a question and an answer")
    return Trace(path.stem, tuple(placed), f"replay of {path.name}; arrivals and reading times are made up")


def _spoken_turns(shared: _Shared, chance: random.Random) -> Iterator[Turn]:
    asked: list[str] = []
    gap_s = 0.0
    for said in shared.conversations:
        if said.sender in ("human", "user"):
            asked.append(said.value)
        elif said.sender in ("gpt", "assistant") and asked:
            text = "\n".join(asked)
            segment = Segment("user", json.dumps(text)[:40], max(1, len(text) // _CHARACTERS_PER_TOKEN), text)
            yield Turn(gap_s, (segment,), max(1, len(said.value) // _CHARACTERS_PER_TOKEN))
            asked, gap_s = [], chance.expovariate(1 / _READING_S)
