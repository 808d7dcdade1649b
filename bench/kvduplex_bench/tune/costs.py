"""What computing and what reading a number of prompt tokens costs, as curves through measured points. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from kvduplex_bench.errors import BenchError

__all__ = ["Compute", "Read", "Sample", "fit_compute", "fit_read"]

_FEWEST: Final = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request.

    Attributes:
        tokens: Prompt tokens that were computed, or read.
        seconds: How long that took.
        size: Bytes that were read; 0 for computing.
    """

    tokens: int
    seconds: float
    size: int = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds to compute a prompt: ``fixed_s + per_token_s * n + per_square_s * n * n``.

    Attributes:
        fixed_s: Of a step, whatever its length.
        per_token_s: Of the layers that look at one token.
        per_square_s: Of attention.
    """

    fixed_s: float
    per_token_s: float
    per_square_s: float

    def seconds(self, tokens: float) -> float:
        """Of a prompt of `tokens`."""
        return self.fixed_s + self.per_token_s * tokens + self.per_square_s * tokens**2

    def saved_s(self, tokens: float, context: float = 0.0) -> float:
        """What need not be computed when `tokens` after a context of `context` tokens come from elsewhere.

        The step itself stays: some tokens are new in every turn.
        """
        return self.seconds(context + tokens) - self.seconds(context)


@dataclass(frozen=True, slots=True)
class Read:
    """Seconds to read KV: ``fixed_s + bytes / rate``.

    Attributes:
        fixed_s: Claim, handshake of the read, and the step in which its end is noticed.
        bytes_per_s: Of the transfer.
        bytes_per_token: Of one token's keys and values.
    """

    fixed_s: float
    bytes_per_s: float
    bytes_per_token: float

    def seconds(self, tokens: float) -> float:
        """Of reading `tokens`."""
        return self.fixed_s + tokens * self.bytes_per_token / self.bytes_per_s


def fit_compute(samples: Sequence[Sample]) -> Compute:
    """The curve of least relative squares through measured prompts, no part of it negative.

    Raises:
        BenchError: Fewer than three lengths, or times that do not grow.
    """
    lengths = sorted({sample.tokens for sample in samples})
    if len(lengths) < _FEWEST:
        raise BenchError(f"prompts of {len(lengths)} lengths were measured; the curve needs {_FEWEST}")
    tokens = np.array([sample.tokens for sample in samples], dtype=float)
    columns = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
    fixed, linear, square = _not_negative(columns, np.array([sample.seconds for sample in samples]))
    if linear + square <= 0:
        raise BenchError("longer prompts did not take longer; stop other traffic on the engines and measure again")
    return Compute(fixed, linear, square)


def fit_read(samples: Sequence[Sample]) -> Read:
    """The line through measured reads.

    Raises:
        BenchError: Fewer than three lengths, or nothing was read.
    """
    read = [sample for sample in samples if sample.size]
    if len({sample.tokens for sample in read}) < _FEWEST:
        raise BenchError(
            f"only {len(read)} of {len(samples)} turns read anything from the decode engine; is reuse on in "
            "the router, and kv_recompute_threshold below the shortest prompt?"
        )
    sizes = np.array([sample.size for sample in read], dtype=float)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1)
    fixed, per_byte = _not_negative(columns, np.array([sample.seconds for sample in read]))
    per_token = float(np.median([sample.size / sample.tokens for sample in read]))
    # Reads whose time does not grow with their size are faster than the clock resolves over these sizes.
    rate = 1 / per_byte if per_byte > 0 else float(np.max(sizes / [sample.seconds for sample in read]))
    return Read(fixed, rate, per_token)


def _not_negative(columns: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Least squares of relative errors with every coefficient at least 0: the best of all ways to leave some out."""
    count = columns.shape[1]
    weighted, target = columns / seconds[:, None], np.ones_like(seconds)
    best, least = np.zeros(count), np.inf
    for kept in (chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)):
        found = np.linalg.lstsq(weighted[:, kept], target, rcond=None)[0]
        error = float(np.sum((weighted[:, kept] @ found - target) ** 2))
        if (found >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[list(kept)] = found
    return tuple(map(float, best))
