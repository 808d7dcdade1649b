"""What differs between the completion APIs, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvduplex_router.pd.body import Body

__all__ = ["CHAT", "COMPLETIONS", "ApiKind"]


@dataclass(frozen=True, slots=True)
class ApiKind:
    """One API as the turn engine needs to know it.

    Attributes:
        name: Label in metrics.
        path: Path here and on engines.
        history: Member that holds what the model reads.
        one_token: Members that make an engine generate exactly one token, as JSON.
        whole_because: Why a body cannot be split over two engines; None when it can.
        stream_ends: Byte strings one of which a complete stream has carried.
    """

    name: str
    path: str
    history: str
    one_token: Mapping[str, bytes]
    whole_because: Callable[[Body], str | None]
    stream_ends: tuple[bytes, ...]


def _one(value: object) -> bool:
    return value is None or (value == 1 and not isinstance(value, bool))


def _shared_reason(body: Body) -> str | None:
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if not _one(body.get("n")) or not _one(body.get("best_of")):
        return "several_choices"
    return "beam_search" if body.get("use_beam_search") else None


def _chat_reason(body: Body) -> str | None:
    return _shared_reason(body) or ("echo" if body.get("echo") else None)


def _completion_reason(body: Body) -> str | None:
    if (reason := _shared_reason(body)) is not None:
        return reason
    if body.get("echo") and (body.get("logprobs") is not None or body.get("max_tokens") == 0):
        return "echo"
    if body.get("max_tokens") == 0:
        return "no_tokens"
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds"
    prompt = body.raw("prompt")
    if prompt.startswith(b'"') or _is_token_list(body, prompt):
        return None
    return "list_prompt"


def _is_token_list(body: Body, prompt: bytes) -> bool:
    return prompt.startswith(b"[") and prompt[1:].lstrip()[:1].isdigit() and isinstance(body.get("prompt"), list)


_FINISH: Final = (b'"finish_reason":"', b'"finish_reason": "', b"data: [DONE]")

CHAT: Final = ApiKind(
    name="chat",
    path="/v1/chat/completions",
    history="messages",
    one_token={"max_tokens": b"1", "max_completion_tokens": b"1", "ignore_eos": b"true"},
    whole_because=_chat_reason,
    stream_ends=_FINISH,
)

COMPLETIONS: Final = ApiKind(
    name="completions",
    path="/v1/completions",
    history="prompt",
    one_token={"max_tokens": b"1", "ignore_eos": b"true"},
    whole_because=_completion_reason,
    stream_ends=_FINISH,
)
