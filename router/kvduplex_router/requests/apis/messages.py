"""``/v1/messages``, Anthropic's API as vLLM serves it."""

from __future__ import annotations

from typing import Any, Final

import orjson

from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind, ErrorStyle

__all__ = ["MESSAGES"]


def _error(kind: str, message: str, _param: str | None, _code: object) -> dict[str, object]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _unforced(body: Body) -> dict[str, bytes]:
    """``any`` and a named tool become ``none``, and an output format goes while the effort beside it stays."""
    changed: dict[str, bytes] = {}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        kept = choice.get("type") in ("auto", "none")
        changed["tool_choice"] = body.raw("tool_choice") if kept else b'{"type":"none"}'
    output: Any = body.get("output_config")
    if isinstance(output, dict):
        changed["output_config"] = orjson.dumps({name: value for name, value in output.items() if name != "format"})
    return changed


_STOP: Final = b'"message_stop"'

MESSAGES: Final = ApiKind(
    name="messages",
    path="/v1/messages",
    history="messages",
    turn_marks=(b'"assistant"',),
    one_token={"max_tokens": b"1"},
    forcing=frozenset({"tool_choice", "output_config"}),
    unforced=_unforced,
    whole_because=lambda _body: None,
    stream_ends=(_STOP, b'"stop_reason":"', b'"stop_reason": "'),
    last_frame=(_STOP,),
    errors=ErrorStyle(_error, lambda value: b"event: error\ndata: " + value + b"\n\n"),
    collects=False,
)
