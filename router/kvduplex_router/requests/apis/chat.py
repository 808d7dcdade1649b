"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Final

import orjson

from kvduplex_router.requests.apis.openai_errors import DONE, FINISH_MARKS, OPENAI_ERRORS
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind, one_choice

__all__ = ["CHAT"]

_UNFORCED: Final = frozenset({"none", "auto"})


def _whole(body: Body) -> str | None:
    return one_choice(body) or ("echo" if body.get("echo") else None)


def _unforced(body: Body) -> dict[str, bytes]:
    """A forced tool is unforced: ``none`` renders the same tools and asks for no tool parser."""
    if "tool_choice" not in body:
        return {}
    choice = body.get("tool_choice")
    kept = isinstance(choice, str) and choice in _UNFORCED
    return {"tool_choice": orjson.dumps(choice) if kept else b'"none"'}


CHAT: Final = ApiKind(
    name="chat",
    path="/v1/chat/completions",
    history="messages",
    turn_marks=(b'"assistant"',),
    one_token={"max_tokens": b"1", "max_completion_tokens": b"1", "ignore_eos": b"true"},
    forcing=frozenset({"response_format", "tool_choice"}),
    unforced=_unforced,
    whole_because=_whole,
    stream_ends=FINISH_MARKS,
    last_frame=(DONE,),
    errors=OPENAI_ERRORS,
)
