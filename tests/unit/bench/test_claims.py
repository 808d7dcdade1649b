"""The arithmetic of the claim comparison, with known answers."""

from __future__ import annotations

import pytest

from kvduplex_bench.claims import Round, compare, measure
from kvduplex_bench.errors import BenchError
from kvduplex_bench.smoke import Arm, Turn


def turn(arm: Arm, hop_s: float, reused: int = 0) -> Turn:
    return Turn(arm, prompt_tokens=1800, reused_tokens=reused, bytes_moved=0, hop_s=hop_s, computed_tokens=1800)


def test_medians_of_one_cluster() -> None:
    turns = [turn(Arm.REUSE, s, 1700) for s in (0.02, 0.03, 0.9)] + [turn(Arm.RECOMPUTE, s) for s in (0.1, 0.2, 0.15)]
    assert measure("stock", turns, [turn(Arm.RECOMPUTE, 0.01)]) == Round("stock", 0.03, 0.15, 0.01, 3)


def test_turns_that_pulled_nothing_are_no_measurement_of_pulls() -> None:
    turns = [turn(Arm.REUSE, 0.02, 1700), turn(Arm.REUSE, 0.02), turn(Arm.RECOMPUTE, 0.1)]
    with pytest.raises(BenchError, match="1 of 2 turns over the leased connector"):
        measure("leased", turns, [turn(Arm.RECOMPUTE, 0.01)])


def test_neighbours_are_compared_so_that_a_slow_minute_falls_out() -> None:
    rounds = [
        Round("leased", 0.022, 0.10, 0.010, 15), Round("stock", 0.020, 0.10, 0.010, 15),
        Round("stock", 0.040, 0.21, 0.012, 15), Round("leased", 0.043, 0.20, 0.014, 15),
        Round("leased", 0.023, 0.10, 0.010, 15), Round("stock", 0.020, 0.10, 0.010, 15),
    ]  # fmt: skip
    overhead = compare(rounds)
    assert overhead.added_s == pytest.approx(0.003)
    assert overhead.control_s == pytest.approx(0.0)
    assert overhead.pull_s == pytest.approx(0.002)
    assert overhead.step_s == pytest.approx(0.010)


def test_an_incomplete_run_is_refused() -> None:
    with pytest.raises(BenchError, match="1 rounds of leased against 0 of stock"):
        compare([Round("leased", 0.1, 0.1, 0.1, 1)])
