"""Rendezvous hashing: the least movement, agreement without talk, bounded load."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.routing.rendezvous import SLACK, bounded, engine_seed, key64, ranked, weights


@dataclass(frozen=True)
class Engine:
    name: str
    in_flight: int = 0


KEYS = [key64(b"session", str(i).encode()) for i in range(150)]
FLEETS = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=12, unique=True)


def owners(names: list[str]) -> list[str]:
    engines = [Engine(name) for name in names]
    return [ranked(key, engines)[0].name for key in KEYS]


@given(FLEETS, st.text(min_size=13, max_size=14))
def test_an_engine_that_joins_takes_keys_only_for_itself(names: list[str], new: str) -> None:
    before, after = owners(names), owners([*names, new])
    assert all(now in (was, new) for was, now in zip(before, after, strict=True))


@given(FLEETS, st.data())
def test_an_engine_that_leaves_gives_only_its_own_keys_away(names: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    if left:
        before, after = owners(names), owners(left)
        assert all(was in (gone, now) for was, now in zip(before, after, strict=True))


def test_a_change_moves_about_one_nth_of_the_keys() -> None:
    names = [f"10.0.0.{i}:8000" for i in range(10)]
    before, after = owners(names), owners(names[:-1])
    moved = sum(was != now for was, now in zip(before, after, strict=True)) / len(KEYS)
    assert 0.03 < moved < 0.2


@given(FLEETS, st.sampled_from(KEYS), st.randoms())
def test_the_order_in_which_engines_are_listed_does_not_matter(names: list[str], key: int, rng: object) -> None:
    engines = [Engine(name) for name in names]
    shuffled = engines[:]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranked(key, engines) == ranked(key, shuffled)


@given(FLEETS, st.sampled_from(KEYS))
def test_ranks_of_many_engines_at_once_are_the_same(names: list[str], key: int) -> None:
    engines = [Engine(name) for name in names]
    ranks = weights(np.array([engine_seed(name) for name in names], np.uint64), key)
    order = [engines[i] for i in np.argsort(ranks)[::-1]]
    assert order == ranked(key, engines)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.sampled_from(KEYS), st.floats(1, 3))
def test_an_overloaded_engine_is_passed_over_for_the_next_in_rank(loads: list[int], key: int, factor: float) -> None:
    engines = [Engine(f"e{i}", load) for i, load in enumerate(loads)]
    limit = math.ceil(factor * (sum(loads) + 1) / len(loads)) + SLACK
    expected = next(engine for engine in ranked(key, engines) if engine.in_flight < limit)
    assert bounded(key, engines, factor) == expected


def test_nobody_is_no_engine() -> None:
    assert bounded(KEYS[0], [], 1.25) is None


def test_keys_are_the_same_in_every_process() -> None:
    assert key64(b"id", b"tenant", b"c-1") == 0x635B165805FD3F07
    assert key64(b"a", b"b") != key64(b"ab", b"")
