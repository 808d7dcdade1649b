"""Token counts: which hop knows what.

The decode engine sees almost the whole prompt as cached, because it has just been handed over; only the hop that
computed the prompt knows how much of it was reused. So usage is the decode engine's, but its cached count is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

__all__ = ["PromptUsage", "with_prompt_usage"]

_DETAILS: Final = re.compile(rb'"prompt_tokens_details"\s*:\s*(\{[^{}]*\})')
_PROMPT_TOKENS: Final = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """What the hop that computed the prompt said.

    Attributes:
        prompt_tokens: Tokens of the prompt; None when it did not say.
        cached_tokens: Of those, tokens it did not compute; None when it did not say.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def of_member(cls, raw: bytes | msgspec.Raw | None) -> PromptUsage:
        """Read a reply's usage member."""
        return cls() if raw is None else cls.parse(orjson.loads(bytes(raw)))

    @classmethod
    def parse(cls, usage: object) -> PromptUsage:
        """Read an OpenAI usage object, trusting no type."""
        if not isinstance(usage, dict):
            return cls()
        details = usage.get("prompt_tokens_details")
        prompt = _count(usage.get("prompt_tokens"))
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        return cls(prompt, cached if cached is None or prompt is None else min(cached, prompt))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def with_prompt_usage(raw: bytes, usage: PromptUsage) -> bytes:
    """A reply, or a stream frame, whose cached count is the prefill hop's; unknown there, it is left out."""
    if b'"prompt_tokens_details"' not in raw:
        return raw
    total = _PROMPT_TOKENS.search(raw)

    def details(match: re.Match[bytes]) -> bytes:
        start = raw[match.start() : match.start(1)]
        if usage.cached_tokens is None:
            return start + b"null"
        bound = int(total[1]) if total else usage.cached_tokens
        try:
            others = orjson.loads(match[1])
        except orjson.JSONDecodeError:
            others = {}
        return start + orjson.dumps({**others, "cached_tokens": min(usage.cached_tokens, bound)})

    return _DETAILS.sub(details, raw)
