"""Where prompts of one class start to differ, found by comparing one now and then with the one before it.

The few prompts that are kept to compare with never leave this process, and neither does any text of them: what is
told is a place, the index of a message and the number of a character.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import msgspec
import orjson

from kvduplex_router.requests.body import Body

__all__ = ["Place", "PromptWatch", "first_difference", "usual"]

_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_KEPT_BYTES: Final = 64 * 1024
_KEPT: Final = 128
_RECENT: Final = 64
_BEFORE: Final = ("tools", "functions", "system", "instructions", "documents", "chat_template_kwargs")
"""Members that templates render in front of the messages."""


class Place(msgspec.Struct, frozen=True):
    """Where two prompts differ first.

    Attributes:
        member: Of the request's body.
        message: Index in it, where it is a list.
        character: Number of the first character that differs, in that message's text, or in its JSON when what differs
            is not its text.
        in_text: Which of these.
    """

    member: str
    message: int | None
    character: int
    in_text: bool


class _Seen(msgspec.Struct, frozen=True):
    before: tuple[bytes, ...]
    messages: tuple[bytes, ...]
    cut: bool


class PromptWatch:
    """Compares prompts of a class and remembers where they differed."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], _Seen] = OrderedDict()
        self._places: dict[str, deque[Place]] = {}

    def look(self, workload: str, tenant: str, history: str, body: Body) -> None:
        """Compare a request with the one of its class and tenant that was looked at before it.

        Args:
            workload: Class.
            tenant: Whose it is; prompts of different tenants are not compared.
            history: Name of the member with the messages.
            body: The request.
        """
        seen = _seen(body, history)
        key = (workload, tenant)
        former = self._last.pop(key, None)
        self._last[key] = seen
        if len(self._last) > _KEPT:
            self._last.popitem(last=False)
        if former is not None and (place := _compare(former, seen, history)) is not None:
            self._places.setdefault(workload, deque(maxlen=_RECENT)).append(place)

    def places(self, workload: str) -> list[Place]:
        """Where prompts of a class started to differ lately."""
        return list(self._places.get(workload, ()))


def usual(places: Sequence[Place]) -> tuple[Place, float] | None:
    """Where prompts most often start to differ, and in what share of the comparisons; None of none.

    Of the differences in that message the earliest is named: what varies there varies from it on.
    """
    if not places:
        return None
    where, count = Counter((place.member, place.message, place.in_text) for place in places).most_common(1)[0]
    there = (place for place in places if (place.member, place.message, place.in_text) == where)
    return min(there, key=lambda place: place.character), count / len(places)


def _seen(body: Body, history: str) -> _Seen:
    before = tuple(body.raw(name)[:_KEPT_BYTES] for name in _BEFORE)
    raw = body.raw(history)
    try:
        parts = [bytes(part) for part in _LIST.decode(raw)] if raw.startswith(b"[") else [raw]
    except (msgspec.DecodeError, RecursionError):
        parts = [raw]
    kept: list[bytes] = []
    left = _KEPT_BYTES
    for part in parts:
        kept.append(part[:left])
        left -= len(part)
        if left <= 0:
            break
    return _Seen(before, tuple(kept), left <= 0)


def _compare(one: _Seen, other: _Seen, history: str) -> Place | None:
    for name, mine, theirs in zip(_BEFORE, one.before, other.before, strict=True):
        if mine != theirs:
            return Place(name, None, _character(mine, theirs), in_text=False)
    for index, (mine_or, theirs_or) in enumerate(zip_longest(one.messages, other.messages)):
        if mine_or is None or theirs_or is None:
            return None  # one goes on where the other ends: the same conversation
        if mine_or != theirs_or:
            character, in_text = _within(mine_or, theirs_or)
            return Place(history, index, character, in_text=in_text)
    return None


def _within(mine: bytes, theirs: bytes) -> tuple[int, bool]:
    texts = [_text(mine), _text(theirs)]
    if texts[0] is not None and texts[1] is not None and texts[0] != texts[1]:
        return first_difference(texts[0], texts[1]), True
    return _character(mine, theirs), False


def _character(mine: bytes, theirs: bytes) -> int:
    return first_difference(mine.decode("utf-8", "replace"), theirs.decode("utf-8", "replace"))


def _text(message: bytes) -> str | None:
    """Text of a message, or a prompt that is text itself; None for anything else, and for what was cut off."""
    try:
        value: Any = orjson.loads(message)
    except orjson.JSONDecodeError:
        return None
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    """Index of the first element in which two sequences differ; the length of the shorter when it begins the other."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # prefixes up to `low` are equal, up to `high` + 1 they are not known to be
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
