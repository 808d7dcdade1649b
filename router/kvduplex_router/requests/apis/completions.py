"""``/v1/completions``."""

from __future__ import annotations

from typing import Final

from kvduplex_router.requests.apis.openai_errors import DONE, FINISH_MARKS, OPENAI_ERRORS
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind, one_choice

__all__ = ["COMPLETIONS"]


def _whole(body: Body) -> str | None:
    if (reason := one_choice(body)) is not None:
        return reason
    if body.get("echo") and (body.get("logprobs") is not None or body.get("max_tokens") == 0):
        return "echo"
    if body.get("max_tokens") == 0:
        return "no_tokens"
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds"
    return None if _single_prompt(body) else "list_prompt"


def _single_prompt(body: Body) -> bool:
    """Whether the prompt is one string or one list of tokens, by its first bytes."""
    prompt = body.raw("prompt")
    return prompt.startswith(b'"') or (prompt.startswith(b"[") and prompt[1:].lstrip()[:1].isdigit())


COMPLETIONS: Final = ApiKind(
    name="completions",
    path="/v1/completions",
    history="prompt",
    turn_marks=(),
    one_token={"max_tokens": b"1", "ignore_eos": b"true"},
    forcing=frozenset({"response_format"}),
    unforced=lambda _body: {},
    whole_because=_whole,
    stream_ends=FINISH_MARKS,
    last_frame=(DONE,),
    errors=OPENAI_ERRORS,
)
