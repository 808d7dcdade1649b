"""JSON as vLLM 0.32 writes it: whole answers, stream chunks, errors, models."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvduplex_bench.sim.http.request import Kind, TurnRequest

__all__ = ["DONE", "Shape", "compact", "error_body", "models_body"]

DONE: Final = b"data: [DONE]\n\n"


def compact(value: object) -> bytes:
    """JSON without spaces."""
    return msgspec.json.encode(value)


class Shape:
    """The shapes of one answer."""

    def __init__(self, request: TurnRequest) -> None:
        chat = request.kind is Kind.CHAT
        self._request = request
        self._chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._object = "chat.completion" if chat else "text_completion"
        self._head = {"id": self.id, "created": int(time.time()), "model": request.model}

    def opening(self) -> bytes:
        """The first frame of a stream, if the API has one of its own."""
        if not self._chat:
            return b""
        return self._frame([self._choice({"role": "assistant", "content": ""}, None)])

    def delta(self, text: str, finish: str | None) -> bytes:
        """A frame with more text."""
        return self._frame([self._choice({"content": text}, finish)])

    def closing(self, cached: int) -> bytes:
        """The frames after the last text."""
        counted = self._frame([], usage=self.usage(cached)) if self._request.include_usage else b""
        return counted + DONE

    def whole(self, text: str, cached: int, params: Mapping[str, Any] | None) -> bytes:
        """A whole answer."""
        finish = self._request.finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        shown = {"message": message} if self._chat else {"text": text}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        value = {**self._head, "object": self._object, "choices": [choice], "usage": self.usage(cached)}
        return compact({**value, "kv_transfer_params": params})

    def usage(self, cached: int) -> dict[str, Any]:
        """Token counts."""
        prompt, output = len(self._request.prompt), self._request.output_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _choice(self, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        shown: dict[str, Any] = {"delta": delta} if self._chat else {"text": delta["content"]}
        return {"index": 0, **shown, "logprobs": None, "finish_reason": finish}

    def _frame(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        kind = f"{self._object}.chunk" if self._chat else self._object
        return b"data: " + compact({**self._head, "object": kind, "choices": choices, **more}) + b"\n\n"


def error_body(message: str, *, kind: str, status: int, param: str | None = None) -> bytes:
    """An error in OpenAI's form."""
    return compact({"error": {"message": message, "type": kind, "param": param, "code": status}})


def models_body(model: str, max_model_len: int) -> bytes:
    """The list of models."""
    entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "vllm", "root": model}
    return compact({"object": "list", "data": [{**entry, "parent": None, "max_model_len": max_model_len}]})
