"""Workloads: what is refused, what is derived, and texts of the wanted length."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.corpus import Corpus
from kvduplex_bench.multiturn.sweep import points
from kvduplex_bench.multiturn.workload import CPU, PUBLISHED, QUICK, Arm, Workload


def test_the_published_workload() -> None:
    assert (PUBLISHED.conversations, PUBLISHED.turns, PUBLISHED.clients, PUBLISHED.active) == (10, 10, 2, 10)
    assert (PUBLISHED.user_tokens, PUBLISHED.answer_tokens, PUBLISHED.warm_up_turns) == (150, 300, 2)
    assert PUBLISHED.prefixes == (2_000, 4_000, 8_000, 12_000, 16_000, 20_000, 24_000)
    assert PUBLISHED.measured_turns == 80


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"turns": 1}, "--turns 1: must be at least 2"),
        ({"conversations": 0}, "--conversations 0: must be at least 1"),
        ({"clients": 11}, "--clients 11: exceeds the 10 conversations"),
        ({"active": 1}, "--clients 2: exceeds the 1 conversations"),
        ({"warm_up": 1.0}, "--warm-up 1.0: is a share"),
        ({"turns": 2, "warm_up": 0.9}, "--warm-up 0.9: leaves none of 2 turns"),
        ({"prefixes": ()}, "--prefixes"),
        ({"prefixes": (100, 100)}, "must differ"),
        ({"think_s": -1.0}, "--think-time -1.0: must not be negative"),
        ({"think_s": float("inf")}, "--think-time inf: must end"),
    ],
)
def test_impossible_knobs_are_named(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message.replace("(", "\\(")):
        replace(PUBLISHED, **knobs)


def test_the_first_turn_never_counts() -> None:
    assert Workload(turns=5, warm_up=0.0).warm_up_turns == 1


def test_conversations_that_outgrow_the_context_are_refused() -> None:
    PUBLISHED.must_fit(32_768)
    with pytest.raises(BenchError, match="a context grows to"):
        PUBLISHED.must_fit(24_576)


def test_the_fingerprint_tells_knobs_apart() -> None:
    assert CPU.fingerprint != QUICK.fingerprint != PUBLISHED.fingerprint
    assert replace(CPU, seed=CPU.seed).fingerprint == CPU.fingerprint


def test_every_point_is_played_once_and_arms_take_turns_in_beginning() -> None:
    arms = (Arm.OFF, Arm.ON)
    played = list(points(CPU, "s", arms))
    assert len({point.key for point in played}) == len(played) == 3 * 7 * 2
    assert [point.repeat for point in played] == sorted(point.repeat for point in played)
    first = Counter(point.arm for point in played[::2])
    assert abs(first[Arm.OFF] - first[Arm.ON]) <= 1


def test_texts_have_the_wanted_length_and_come_back_for_the_same_key() -> None:
    corpus = Corpus(seed=1, tokens_per_word=2.0)
    text = corpus.text("key", 3_000)
    assert len(text.split()) == 1_500
    assert text == Corpus(1, 2.0).text("key", 3_000)
    assert text != corpus.text("other", 3_000)
    assert text != Corpus(2, 2.0).text("key", 3_000)


def test_texts_of_one_prefix_share_no_long_beginning_with_another() -> None:
    corpus = Corpus(seed=1, tokens_per_word=1.0)
    assert corpus.text("prefix/2000", 2_000)[:40] != corpus.text("prefix/4000", 4_000)[:40]
