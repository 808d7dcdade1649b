"""Messages and tools as a chat template sees them, out of request bodies, by the rules of vLLM's API server.

Those rules: text parts are joined by line breaks, arguments of tool calls become objects, empty tool calls go, and
tools and tool calls have the members that its types know, in their order, whatever order the client wrote them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from kvduplex_router.requests.body import Body
from kvduplex_router.tokens.errors import NotRenderableError

__all__ = ["Chat", "chat_of"]

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_KEPT: Final = ("name", "tool_call_id")
_RENDERED_ELSEWHERE: Final = ("documents", "chat_template", "prompt_embeds", "media_io_kwargs", "mm_processor_kwargs")


class Chat:
    """What goes into a chat template.

    Attributes:
        messages: In order.
        tools: None when there are none.
        generation_prompt: Whether the answer's beginning is rendered.
        arguments: Further template variables.
        special_tokens: Whether the tokenizer adds its own besides.
    """

    __slots__ = ("arguments", "generation_prompt", "messages", "special_tokens", "tools")

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        special_tokens: bool = False,
    ) -> None:
        self.messages = messages
        self.tools = tools
        self.generation_prompt = generation_prompt
        self.arguments = arguments or {}
        self.special_tokens = special_tokens


def chat_of(body: Body, *, parts: bool = False) -> Chat:
    """The chat in a body of ``/v1/chat/completions``.

    Args:
        body: The body.
        parts: Whether content goes to the template as a list of parts.

    Raises:
        NotRenderableError: Its prompt cannot be worked out here.
    """
    if any(body.raw(name) != b"null" for name in _RENDERED_ELSEWHERE) or body.get("continue_final_message"):
        raise NotRenderableError("api", "a member that the engine renders in its own way")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NotRenderableError("shape")
    arguments = body.get("chat_template_kwargs")
    generation_prompt = body.get("add_generation_prompt")
    return Chat(
        [_message(each, parts=parts) for each in messages],
        _tools(body.get("tools")),
        generation_prompt=generation_prompt is None or bool(generation_prompt),
        arguments={**_effort(body), **arguments} if isinstance(arguments, dict) else _effort(body),
        special_tokens=bool(body.get("add_special_tokens")),
    )


def _effort(body: Body) -> dict[str, Any]:
    effort = body.get("reasoning_effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _message(value: Any, *, parts: bool) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise NotRenderableError("shape")
    role = value["role"]
    if role == "developer":
        raise NotRenderableError("content", "a developer message")
    texts = _texts(value.get("content"))
    listed = parts and role != "tool"
    content: Any = [{"type": "text", "text": text} for text in texts] if listed else "\n".join(texts)
    message: dict[str, Any] = {"role": role, "content": content}
    for name in _KEPT:
        if isinstance(value.get(name), str):
            message[name] = value[name]
    if role == "assistant":
        calls = value.get("tool_calls")
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        reasoning = value.get("reasoning") or value.get("reasoning_content")
        if reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
    return message


def _texts(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise NotRenderableError("shape")
    return [_part(part) for part in value]


def _part(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("type") in _TEXT_PARTS:
        text = value.get("text", value.get("refusal"))
        if isinstance(text, str):
            return text
    raise NotRenderableError("content")


def _call(value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise NotRenderableError("shape")
    inner = {"arguments": _arguments(function.get("arguments")), "name": function.get("name")}
    return {"id": value.get("id"), "function": inner, "type": "function"}


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value or {}
    try:
        return orjson.loads(value) if value else {}
    except orjson.JSONDecodeError:
        return {}


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if not value:
        return None
    if not isinstance(value, list):
        raise NotRenderableError("shape")
    return [_tool(tool) for tool in value]


def _tool(value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise NotRenderableError("shape")
    filled = {name: function.get(name) for name in ("name", "description", "parameters")}
    more = {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": "function", "function": {**filled, **more}}
