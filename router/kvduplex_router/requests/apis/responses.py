"""``/v1/responses``.

A response that is stored, runs in the background, goes on from a stored one or uses the engine's own tools belongs to
one engine from beginning to end.
"""

from __future__ import annotations

from typing import Final

from kvduplex_router.requests.apis.openai_errors import OPENAI_ERRORS
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind, ErrorStyle, one_choice

__all__ = ["RESPONSES"]

_UNFORCED: Final = (b'"auto"', b'"none"')


def _whole(body: Body) -> str | None:
    if body.get("background"):
        return "background"
    if body.get("previous_response_id") is not None:
        return "previous_response"
    if body.get("previous_input_messages") is not None:
        return "previous_messages"
    tools = body.get("tools")
    if isinstance(tools, list) and any(not isinstance(t, dict) or t.get("type") != "function" for t in tools):
        return "engine_tools"
    return one_choice(body)


def _unforced(body: Body) -> dict[str, bytes]:
    raw = body.raw("tool_choice")
    return {"tool_choice": raw if raw in _UNFORCED else b'"auto"'} if "tool_choice" in body else {}


_ENDS: Final = tuple(
    b'"type":%b"response.%b"' % (space, end)
    for space in (b"", b" ")
    for end in (b"completed", b"incomplete", b"failed")
)

RESPONSES: Final = ApiKind(
    name="responses",
    path="/v1/responses",
    history="input",
    turn_marks=(b'"assistant"', b'"function_call"', b'"reasoning"'),
    one_token={"max_output_tokens": b"1", "store": b"false", "ignore_eos": b"true"},
    forcing=frozenset({"text", "tool_choice"}),
    unforced=_unforced,
    whole_because=_whole,
    stream_ends=_ENDS,
    last_frame=_ENDS,
    errors=ErrorStyle(OPENAI_ERRORS.body, lambda value: b"event: error\ndata: " + value + b"\n\n"),
    collects=False,
)
