"""OpenAI's error object."""

from __future__ import annotations

from typing import Final

from kvduplex_router.requests.kinds import ErrorStyle

__all__ = ["DONE", "FINISH_MARKS", "OPENAI_ERRORS"]


def _body(kind: str, message: str, param: str | None, code: object) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


OPENAI_ERRORS: Final = ErrorStyle(_body, lambda value: b"data: " + value + b"\n\n")

DONE: Final = b"\ndata: [DONE]"

FINISH_MARKS: Final = (b'"finish_reason":"', b'"finish_reason": "', DONE)
"""What a complete stream of chat or text completions has carried; none of it can stand in generated text."""
