"""Statistics with known answers."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_bench.errors import BenchError
from kvduplex_bench.stats import percentile, ratio_of_medians, summarise


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (25, 1.75), (50, 2.5), (75, 3.25), (90, 3.7), (99, 3.97), (100, 4.0)]
)
def test_percentiles_of_four_values(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(expected)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_agree_with_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_one_value_is_every_percentile() -> None:
    summary = summarise([7.0])
    assert (summary.low, summary.p50, summary.p99, summary.high, summary.mean, summary.count) == (7, 7, 7, 7, 7, 1)


def test_summary_of_a_hundred() -> None:
    values = [float(n) for n in range(1, 101)]
    summary = summarise(values)
    assert (summary.p50, summary.p90, summary.p95) == pytest.approx((50.5, 90.1, 95.05))
    assert summary.p99 == pytest.approx(99.01)
    assert summary.mean == statistics.fmean(values)


def test_ratio_compares_medians_and_not_means() -> None:
    assert ratio_of_medians([10.0, 30.0, 1000.0], [1.0, 2.0, 900.0]) == pytest.approx(15.0)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_senseless_questions_are_refused(values: list[float], percent: float) -> None:
    with pytest.raises(BenchError):
        percentile(values, percent)


def test_a_zero_median_is_not_divided_by() -> None:
    with pytest.raises(BenchError, match="cannot be divided"):
        ratio_of_medians([1.0], [0.0])
