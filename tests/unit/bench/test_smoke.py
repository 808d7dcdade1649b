"""The arithmetic of the smoke benchmark, with known answers."""

from __future__ import annotations

import json

import pytest

from kvduplex_bench.errors import BenchError
from kvduplex_bench.smoke import Arm, Turn, as_json, summarise


def turn(arm: Arm, hop_s: float) -> Turn:
    return Turn(arm, prompt_tokens=1800, reused_tokens=0, bytes_moved=0, hop_s=hop_s, computed_tokens=1800)


def test_ratio_is_the_median_of_the_pairs_and_not_of_the_arms() -> None:
    reuse = [turn(Arm.REUSE, s) for s in (0.1, 0.2, 0.4)]
    recompute = [turn(Arm.RECOMPUTE, s) for s in (0.3, 1.0, 0.8)]
    summary = summarise([*reuse, *recompute])
    assert (summary.pairs, summary.reuse_s, summary.recompute_s) == (3, 0.2, 0.8)
    assert summary.ratio == pytest.approx(3.0)
    assert summary.ratio_low == pytest.approx(2.0)
    assert summary.ratio_high == pytest.approx(5.0)


@pytest.mark.parametrize("turns", [[], [turn(Arm.REUSE, 1.0)], [turn(Arm.RECOMPUTE, 1.0)]])
def test_an_incomplete_run_is_refused(turns: list[Turn]) -> None:
    with pytest.raises(BenchError, match="nothing to compare"):
        summarise(turns)


def test_json_lines_begin_with_their_provenance() -> None:
    first, second = map(json.loads, as_json([turn(Arm.REUSE, 0.5)], {"bench": "smoke"}).splitlines())
    assert first == {"bench": "smoke"}
    assert (second["arm"], second["hop_s"]) == ("reuse", 0.5)
