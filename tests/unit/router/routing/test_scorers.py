"""Scores lie in [0, 1], and with equal weights the best sum is the earliest first token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.config import WeightsConfig
from kvduplex_router.routing.scorers import SCORERS, View, total

NUMBERS = st.floats(allow_nan=False, min_value=-1e9, max_value=1e9)


@given(NUMBERS, NUMBERS, st.booleans(), st.booleans(), st.floats(1e-9, 1e9))
def test_every_score_is_in_the_unit_interval(
    overlap_s: float, wait_s: float, session: bool, home: bool, scale_s: float
) -> None:
    view = View(overlap_s, wait_s, session, home, scale_s)
    assert all(0.0 <= score(view) <= 1.0 for score in SCORERS.values())


FIGURES = st.tuples(st.floats(0, 5), st.floats(0, 1), st.floats(1e-5, 1e-3))


@given(st.lists(FIGURES, min_size=2, max_size=10), st.integers(1, 50_000))
def test_the_best_sum_is_the_earliest_first_token(figures: list[tuple[float, float, float]], tokens: int) -> None:
    """Engines by wait in seconds, part of the prompt held, and seconds per token."""
    fastest = min(per_token for _, _, per_token in figures)
    scale = max(wait + tokens * per_token for wait, _, per_token in figures)
    weights = WeightsConfig(overlap=1, session=0, home=0)
    scores = [
        total(View(held * tokens * p, wait + tokens * (p - fastest), False, False, scale), weights)
        for wait, held, p in figures
    ]
    seconds = [wait + (1 - held) * tokens * p for wait, held, p in figures]
    best = max(range(len(figures)), key=scores.__getitem__)
    assert seconds[best] <= min(seconds) + 1e-6 * scale
