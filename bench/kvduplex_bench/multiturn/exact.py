"""Whether a turn that reused KV says what a plain engine says, token for token, and as likely."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvduplex_bench.errors import BenchError

__all__ = ["COMPARED_TOKENS", "LOGPROB_MEMBERS", "Comparison", "Verdict", "compare"]

COMPARED_TOKENS: Final = 16
LOGPROB_MEMBERS: Final[Mapping[str, Any]] = {"logprobs": True, "top_logprobs": 2}
_TOLERANCE: Final = 2e-3
"""Of a log probability. Rounding between two ways to split a float32 prompt stays below a tenth of it; KV of another
prompt is beyond it by orders of magnitude."""


class Verdict(StrEnum):
    """Outcome of a comparison."""

    EQUAL = "equal"
    TIE = "tie"
    """The tokens part where the two likeliest are closer than rounding; nothing wrong can be seen before."""
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found.

    Attributes:
        verdict: The outcome.
        tokens: Tokens compared until the end or the first difference.
        worst: Largest difference of a log probability among them.
    """

    verdict: Verdict
    tokens: int
    worst: float


def compare(answer: Mapping[str, Any], reference: Mapping[str, Any]) -> Comparison:
    """Compare two whole chat answers with log probabilities.

    Raises:
        BenchError: One of them carries none.
    """
    mine, theirs = _tokens(answer, "the router"), _tokens(reference, "the reference engine")
    worst = 0.0
    for index, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one["token"] != other["token"]:
            tie = _margin(other) < _TOLERANCE
            return Comparison(Verdict.TIE if tie and worst <= _TOLERANCE else Verdict.DIFFERENT, index, worst)
        worst = max(worst, abs(one["logprob"] - other["logprob"]))
    length = min(len(mine), len(theirs))
    equal = worst <= _TOLERANCE and len(mine) == len(theirs)
    return Comparison(Verdict.EQUAL if equal else Verdict.DIFFERENT, length, worst)


def _tokens(answer: Mapping[str, Any], whose: str) -> Sequence[Mapping[str, Any]]:
    choices = answer.get("choices") or [{}]
    content = (choices[0].get("logprobs") or {}).get("content")
    if not content:
        raise BenchError(f"{whose} answered without log probabilities; answers cannot be compared (--no-check)")
    found: Sequence[Mapping[str, Any]] = content
    return found


def _margin(token: Mapping[str, Any]) -> float:
    """How far the two likeliest tokens are apart."""
    top = sorted((one["logprob"] for one in token.get("top_logprobs") or []), reverse=True)
    return top[0] - top[1] if len(top) > 1 else math.inf
