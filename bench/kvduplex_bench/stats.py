"""Statistics of latencies: percentiles, and ratios of arms. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvduplex_bench.errors import BenchError

__all__ = ["Summary", "percentile", "ratio_of_medians", "summarise"]

_MOST = 100.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a sample of times looks like, in the unit of its values.

    Attributes:
        count: Size of the sample.
        mean: Arithmetic mean.
        low: Smallest value.
        p50: Median.
        p90: 90th percentile.
        p95: 95th percentile.
        p99: 99th percentile.
        high: Largest value.
    """

    count: int
    mean: float
    low: float
    p50: float
    p90: float
    p95: float
    p99: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile, interpolated linearly between the two nearest values, as numpy does by default.

    Raises:
        BenchError: There is no value, or `percent` lies outside 0 to 100.
    """
    if not values:
        raise BenchError("no percentile of no values; nothing was measured")
    if not 0 <= percent <= _MOST:
        raise BenchError(f"percentile {percent:g} lies outside 0 to 100")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / _MOST
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(values: Sequence[float]) -> Summary:
    """Describe a sample.

    Raises:
        BenchError: It is empty.
    """
    p50, p90, p95, p99 = (percentile(values, percent) for percent in (50, 90, 95, 99))
    return Summary(len(values), statistics.fmean(values), min(values), p50, p90, p95, p99, max(values))


def ratio_of_medians(slow: Sequence[float], fast: Sequence[float]) -> float:
    """How many times the median of `slow` is that of `fast`.

    Raises:
        BenchError: One of them is empty, or the median of `fast` is not above 0.
    """
    divisor = percentile(fast, 50)
    if divisor <= 0:
        raise BenchError(f"a median time of {divisor:g} s cannot be divided by; the clock or the run is broken")
    return percentile(slow, 50) / divisor
