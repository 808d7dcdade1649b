"""Request schemas for the OpenAPI document: what the router itself looks at; engines know the rest."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["EXAMPLES"]

_CONVERSATION: Final = {
    "conversation_id": {
        "type": "string", "minLength": 1, "maxLength": 256,
        "description": "Names the conversation, so that the next turn finds this one's KV. Not sent to engines.",
    },
}  # fmt: skip


def _schema(required: list[str], **properties: Any) -> dict[str, Any]:
    everything = {"model": {"type": "string"}, "stream": {"type": "boolean"}, **properties, **_CONVERSATION}
    return {"type": "object", "required": required, "properties": everything, "additionalProperties": True}


_MESSAGES: Final = {"type": "array", "items": {"type": "object"}, "minItems": 1}
_TURN: Final = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "conversation_id": "c-1"}

EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"schema": _schema(["messages"], messages=_MESSAGES), "example": _TURN},
    "/v1/completions": {
        "schema": _schema(["prompt"], prompt={"oneOf": [{"type": "string"}, {"type": "array"}]}),
        "example": {"model": "default", "prompt": "Once", "max_tokens": 16},
    },
    "/v1/responses": {
        "schema": _schema(["input"], input={"oneOf": [{"type": "string"}, {"type": "array"}]}),
        "example": {"model": "default", "input": "Hello", "store": False},
    },
    "/v1/messages": {
        "schema": _schema(["messages", "max_tokens"], messages=_MESSAGES, max_tokens={"type": "integer", "minimum": 1}),
        "example": {**_TURN, "max_tokens": 16},
    },
}
