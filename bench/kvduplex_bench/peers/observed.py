"""What one client saw of a set of requests, and how two clients compare. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvduplex_bench.errors import BenchError
from kvduplex_bench.stats import percentile

__all__ = ["METRICS", "Agreement", "Observed", "agreement"]

METRICS: Final = ("ttft_s", "itl_s", "e2e_s")
_LEAST_NOISE: Final = 0.05
_MOST_NOISE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Observed:
    """One request.

    Attributes:
        ttft_s: Time to first token.
        itl_s: Mean time between tokens.
        e2e_s: Time to the last token.
    """

    ttft_s: float
    itl_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """One metric by two clients that took turns.

    Attributes:
        metric: Of `METRICS`.
        ours_s: Our median.
        theirs_s: Their median.
        ratio: Median of the rounds' ratios, theirs to ours.
        noise: How far our own rounds lie apart, as a share of our median; 5 % at least.
    """

    metric: str
    ours_s: float
    theirs_s: float
    ratio: float
    noise: float

    @property
    def verdict(self) -> str:
        """``agree`` when the two differ by no more than our own rounds do, and these do not differ too much to tell."""
        if abs(self.ratio - 1) > self.noise:
            return "DIFFER"
        return "agree" if self.noise <= _MOST_NOISE else "too noisy to tell"


def agreement(metric: str, ours: Sequence[Sequence[Observed]], theirs: Sequence[Sequence[Observed]]) -> Agreement:
    """Compare a metric round by round.

    Args:
        metric: Of `METRICS`.
        ours: What our client saw in each round.
        theirs: What the other one saw.

    Raises:
        BenchError: A round is empty, or there are none.
    """
    if not ours or len(ours) != len(theirs) or not all((*ours, *theirs)):
        raise BenchError("a round without answered requests cannot be compared; see the messages above")
    mine, other = ([percentile([getattr(o, metric) for o in one], 50) for one in rounds] for rounds in (ours, theirs))
    if min(mine) <= 0:
        raise BenchError(f"a round whose median {metric} is 0 cannot be compared; ask for answers of several tokens")
    middle = percentile(mine, 50)
    noise = max(_LEAST_NOISE, (max(mine) - min(mine)) / middle)
    ratio = percentile([b / a for a, b in zip(mine, other, strict=True)], 50)
    return Agreement(metric, middle, percentile(other, 50), ratio, noise)
