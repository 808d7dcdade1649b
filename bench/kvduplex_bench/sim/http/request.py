"""Requests to a simulated engine, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, Final

import msgspec

from kvduplex_bench.sim.http.tokens import TemplateFailedError, Tokens

__all__ = ["Kind", "RefusedError", "TurnRequest", "read_request"]

_DEFAULT_MEAN: Final = 128
_LEAST, _MOST = 8, 1024


class Kind(StrEnum):
    """Which API."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class RefusedError(Exception):
    """A request that vLLM would refuse too.

    Attributes:
        status: HTTP status.
        kind: Error type as vLLM names it.
        param: The parameter at fault.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A checked request.

    Attributes:
        kind: Which API.
        model: Model asked for.
        prompt: Token ids.
        output_tokens: Tokens to generate.
        finish_reason: ``length`` when the client set the limit, else ``stop``.
        stream: Whether the answer is streamed.
        include_usage: Whether a stream ends with token counts.
        params: ``kv_transfer_params``.
        salt: Cache salt.
    """

    kind: Kind
    model: str
    prompt: list[int]
    output_tokens: int
    finish_reason: str
    stream: bool
    include_usage: bool
    params: Mapping[str, Any] | None
    salt: str


def read_request(raw: bytes, kind: Kind, tokens: Tokens, *, model: str, max_model_len: int) -> TurnRequest:
    """Read a body.

    Raises:
        RefusedError: As vLLM would.
    """
    body = _object(raw)
    asked = body.get("model") or model
    if asked != model:
        raise RefusedError(f"The model `{asked}` does not exist.", status=404, kind="NotFoundError", param="model")
    prompt = _chat_prompt(body, tokens) if kind is Kind.CHAT else _text_prompt(body, tokens)
    if not prompt:
        raise RefusedError("the prompt is empty", param="prompt")
    if body.get("n") not in (None, 1):
        raise RefusedError("n above 1 is not simulated", param="n")
    limit = _limit(body, kind)
    room = max_model_len - len(prompt)
    if room < 1 or (limit is not None and limit > room):
        wanted = f" and {limit} in the completion" if limit else ""
        raise RefusedError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{len(prompt)} tokens in the messages{wanted}."
        )
    options = body.get("stream_options")
    params = body.get("kv_transfer_params")
    return TurnRequest(
        kind=kind,
        model=model,
        prompt=prompt,
        output_tokens=min(room, _own_length(prompt)) if limit is None else limit,
        finish_reason="stop" if limit is None else "length",
        stream=bool(body.get("stream")),
        include_usage=bool(isinstance(options, dict) and options.get("include_usage")),
        params=params if isinstance(params, dict) else None,
        salt=str(body.get("cache_salt") or ""),
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError("the body is not a JSON object")
    return body


def _chat_prompt(body: Mapping[str, Any], tokens: Tokens) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise RefusedError("messages must be a list of objects, and not empty", param="messages")
    flat = [{**message, "content": _flat(message.get("content"))} for message in messages]
    arguments = body.get("chat_template_kwargs")
    extra = {"tools": body.get("tools"), **(arguments if isinstance(arguments, dict) else {})}
    try:
        return tokens.chat(flat, extra)
    except TemplateFailedError as error:
        raise RefusedError(str(error), param="messages") from error


def _flat(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, dict))


def _text_prompt(body: Mapping[str, Any], tokens: Tokens) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return tokens.text(prompt)
    if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise RefusedError("prompt must be a string or a list of token ids", param="prompt")


def _limit(body: Mapping[str, Any], kind: Kind) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if kind is Kind.CHAT else ("max_tokens",)
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise RefusedError(f"{name} must be at least 1, got {value!r}", param=name)
        return value
    return None if kind is Kind.CHAT else 16


def _own_length(prompt: list[int]) -> int:
    """How long the answer to a prompt is when nobody limits it; the same for the same prompt."""
    drawn = Random(hash(tuple(prompt[-64:]))).expovariate(1 / _DEFAULT_MEAN)
    return min(_MOST, max(_LEAST, int(drawn)))
