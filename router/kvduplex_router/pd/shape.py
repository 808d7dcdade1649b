"""Bodies for the two hops of a turn.

The prefill hop must render the prompt the decode hop renders, and do nothing else: one token, no stream, nothing that
could end, force or constrain that token. So fields that shape the answer go, and everything that may reach a chat
template or the tokenizer stays as the client wrote it. What no engine takes stays too, where one look tells and where
it could shape nothing: the prefill engine then refuses the turn in its own words before anybody computes.
"""

from __future__ import annotations

from typing import Any, Final

from kvduplex_router.requests.apis import CHAT
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.fields import KV_PARAMS, OWNED, client_extras
from kvduplex_router.requests.kinds import ApiKind

__all__ = ["decode_body", "prefill_body", "whole_body"]

_ANSWER_ONLY: Final = frozenset({
    "stream", "stream_options", "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "n", "best_of",
    "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern",
    "structural_tag", "logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget", "repetition_detection",
    "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "routed_experts_prompt_start", "store",
    "background", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop_sequences",
})  # fmt: skip


_WORDS: Final = ("stop", "stop_sequences", "bad_words")


def _refused_anyway(kind: ApiKind, body: Body) -> set[str]:
    """Members that would be left out and that an engine refuses as they are."""
    kept = {name for name in _WORDS if name in body and _no_words(body.get(name))}
    if body.get("stream_options") and not body.get("stream"):
        kept.add("stream_options")
    if kind is CHAT:
        if body.get("top_logprobs") and not body.get("logprobs"):
            kept.add("top_logprobs")
        if "tool_choice" in body and body.get("tools") is None:
            kept.add("tool_choice")
    return kept


def _no_words(value: Any) -> bool:
    """Whether what should be words cannot be taken for any, so that an engine which took it would not act on it."""
    if isinstance(value, list):
        return bool(value) and not any(isinstance(each, str) for each in value)
    return value is not None and not isinstance(value, str)


def prefill_body(kind: ApiKind, body: Body, params: bytes, *, keep_forcing: bool = False) -> bytes:
    """The prefill engine's body.

    Args:
        kind: The API.
        body: The client's body.
        params: The prefill engine's transfer parameters, as JSON.
        keep_forcing: Keep ``tool_choice`` and ``response_format``, for models whose template renders them.
    """
    extra = {**client_extras(body), "stream": b"false", **kind.one_token, KV_PARAMS: params}
    refused = _refused_anyway(kind, body)
    without = _ANSWER_ONLY | OWNED
    if not keep_forcing:
        without |= kind.forcing
        extra.update((name, value) for name, value in kind.unforced(body).items() if name not in refused)
    return body.render(without=without - refused if refused else without, extra=extra)


def decode_body(body: Body, params: bytes) -> bytes:
    """The decode engine's body: the client's own with the transfer parameters."""
    return body.render(without=OWNED, extra={**client_extras(body), KV_PARAMS: params})


def whole_body(body: Body) -> bytes:
    """The body of a request that one engine serves alone."""
    return body.render(without=OWNED, extra=client_extras(body))
