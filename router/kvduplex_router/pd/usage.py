"""Token counts: which hop knows what.

The decode engine sees almost the whole prompt as cached, because it has just been handed over; only the hop that
computed the prompt knows how much of it was reused. So usage is the decode engine's, but its cached count is not.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import orjson

__all__ = ["NO_USAGE", "PromptUsage", "may_name_cached", "with_prompt_usage"]

_DETAILS: Final = re.compile(rb'"(?:prompt|input)_tokens_details"\s*:\s*(\{[^{}]*\})')
_TOTAL: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
_CACHE_READ: Final = re.compile(rb',?\s*"cache_read_input_tokens"\s*:\s*(\d+)')


class PromptUsage(msgspec.Struct, frozen=True):
    """What the hop that computed the prompt said.

    Attributes:
        prompt_tokens: Tokens of the prompt; None when it did not say.
        cached_tokens: Of those, tokens it did not compute; None when it did not say.
        generated_tokens: Tokens of its answer; None when it did not say.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None

    @classmethod
    def of_member(cls, raw: bytes | msgspec.Raw | None) -> PromptUsage:
        """Read a reply's usage member."""
        return NO_USAGE if raw is None else cls.parse(orjson.loads(bytes(raw)))

    @classmethod
    def parse(cls, usage: object) -> PromptUsage:
        """Read a usage object of any of the APIs, trusting no type."""
        if not isinstance(usage, dict):
            return cls()
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        read = _count(usage.get("cache_read_input_tokens"))
        total = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
        generated = _count(usage.get("completion_tokens", usage.get("output_tokens")))
        if read is not None:  # Anthropic counts what was read from the cache, and written to it, apart from the input
            written = _count(usage.get("cache_creation_input_tokens")) or 0
            return cls(None if total is None else total + read + written, read, generated)
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        return cls(total, cached if cached is None or total is None else min(cached, total), generated)


NO_USAGE: Final = PromptUsage()


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def may_name_cached(raw: bytes) -> bool:
    """Whether `with_prompt_usage` could change something."""
    return b"cache" in raw


def with_prompt_usage(raw: bytes, usage: PromptUsage) -> bytes:
    """A reply, or a stream frame, whose cached count is the prefill hop's; unknown there, it is left out."""
    if b'"cache_read_input_tokens"' in raw:
        return _apart(raw, usage)
    if b'_tokens_details"' not in raw:
        return raw
    total = _TOTAL.search(raw)

    def details(match: re.Match[bytes]) -> bytes:
        start = raw[match.start() : match.start(1)]
        if usage.cached_tokens is None:
            return start + b"null"
        bound = int(total[1]) if total else usage.cached_tokens
        others = orjson.loads(match[1])
        return start + orjson.dumps({**others, "cached_tokens": min(usage.cached_tokens, bound)})

    return _DETAILS.sub(details, raw)


def _apart(raw: bytes, usage: PromptUsage) -> bytes:
    """Anthropic's form: what was read from the cache and the rest of the input are two numbers with one sum."""
    given, read = _TOTAL.search(raw), _CACHE_READ.search(raw)
    if given is None or read is None:
        return raw
    total = int(given[1]) + int(read[1])
    cached = min(usage.cached_tokens or 0, total)
    raw = _TOTAL.sub(lambda match: match[0][: -len(match[1])] + b"%d" % (total - cached), raw)
    return _CACHE_READ.sub(lambda match: match[0][: -len(match[1])] + b"%d" % cached, raw)
