"""What differs between the generating APIs, as data; `kvduplex_router.requests.apis` holds one of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvduplex_router.requests.body import Body

__all__ = ["ApiKind", "ErrorStyle", "one_choice"]


class ErrorStyle:
    """How an API spells errors.

    Attributes:
        body: Makes the JSON value of an error from type, message, parameter and code.
        event: Makes the stream frame from that value's JSON.
    """

    def __init__(
        self,
        body: Callable[[str, str, str | None, object], dict[str, object]],
        event: Callable[[bytes], bytes],
    ) -> None:
        self.body = body
        self.event = event


@dataclass(frozen=True, slots=True)
class ApiKind:
    """One API as the turn engine needs to know it.

    Attributes:
        name: Label in metrics.
        path: Path here and on engines.
        history: Member that holds what the model reads.
        turn_marks: Byte strings in messages that an engine generated; an earlier request may end just before one.
        one_token: Members that make an engine generate exactly one token and store nothing, as JSON.
        forcing: Members that force or constrain the answer and that few chat templates render.
        unforced: Replacements for members that force the answer, as JSON.
        whole_because: Why a body cannot be split over two engines; None when it can.
        stream_ends: Byte strings one of which a complete stream has carried.
        last_frame: Of these, those that only its last frame carries; clients close as soon as they have read it.
        errors: How errors are spelt.
        collects: Whether an answer can be put together for the guard of stock engines.
    """

    name: str
    path: str
    history: str
    turn_marks: tuple[bytes, ...]
    one_token: Mapping[str, bytes]
    forcing: frozenset[str]
    unforced: Callable[[Body], dict[str, bytes]]
    whole_because: Callable[[Body], str | None]
    stream_ends: tuple[bytes, ...]
    last_frame: tuple[bytes, ...]
    errors: ErrorStyle
    collects: bool = True


def one_choice(body: Body) -> str | None:
    """Why a body that asks for more than one plain choice cannot be split; None when it does not."""
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if not _one(body.get("n")) or not _one(body.get("best_of")):
        return "several_choices"
    return "beam_search" if body.get("use_beam_search") else None


def _one(value: object) -> bool:
    return value is None or (value == 1 and not isinstance(value, bool))
