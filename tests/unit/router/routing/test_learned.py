"""The router's own memory of prompts: the most recent ones, about as much as an engine's cache holds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.routing.learned import UNIT, LearnedPrefixes


def prompt(seed: int, units: int = 4) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 2**64) for _ in range(units)]


def memory(*, engine_units: int = 1_000, max_units: int = 10_000, engines: int = 8) -> LearnedPrefixes:
    return LearnedPrefixes(max_units=max_units, max_engines=engines, engine_tokens=engine_units * UNIT)


def test_what_was_sent_is_remembered_by_its_longest_common_beginning() -> None:
    learned = memory()
    learned.sent("a", prompt(1))
    learned.sent("b", prompt(1)[:2])
    assert learned.overlaps([*prompt(1), 7]) == {"a": 4, "b": 2}
    assert learned.overlaps([*prompt(1)[:3], 9]) == {"a": 3, "b": 2}
    assert learned.overlaps(prompt(2)) == {}
    assert learned.overlaps([]) == {}


def test_the_least_recently_used_is_forgotten_and_what_is_used_stays() -> None:
    learned = memory(engine_units=80)
    learned.sent("a", prompt(0))
    learned.sent("a", prompt(1))
    for i in range(2, 60):
        learned.sent("a", prompt(0))
        learned.sent("a", prompt(i))
    assert learned.overlaps(prompt(0)) == {"a": 4}
    assert learned.overlaps(prompt(59)) == {"a": 4}
    assert learned.overlaps(prompt(1)) == {}
    assert len(learned) <= 80 + 40, "two generations, and a dying one"


def test_what_was_not_sent_for_two_generations_is_forgotten() -> None:
    learned = memory()
    learned.sent("a", prompt(1))
    learned.sent("b", prompt(2))
    learned.age()
    learned.sent("a", prompt(1))
    learned.age()
    assert learned.overlaps(prompt(2)) == {}
    assert learned.overlaps(prompt(1)) == {"a": 4}
    learned.age()
    assert learned.overlaps(prompt(1)) == {}
    learned.age()
    assert len(learned) == 0


def test_forgetting_an_engine_gives_its_place_to_another() -> None:
    learned = memory(engines=2)
    for i in range(20):
        learned.sent(f"e{i}", prompt(3))
        assert learned.overlaps(prompt(3)) == {f"e{i}": 4}
        learned.forget(f"e{i}")
    assert len(learned) == 0


def test_engines_beyond_its_room_are_counted_and_left_out() -> None:
    learned = memory(engines=1)
    learned.sent("a", prompt(1))
    learned.sent("b", prompt(1))
    assert learned.overlaps(prompt(1)) == {"a": 4}
    assert learned.full == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=120))
def test_it_never_remembers_what_was_not_sent_and_stays_in_bounds(steps: list[tuple[str, int]]) -> None:
    learned = memory(engine_units=24, max_units=60)
    sent: set[tuple[str, int]] = set()
    for engine, seed in steps:
        learned.sent(engine, prompt(seed))
        sent.add((engine, seed))
    assert len(learned) <= 60
    for seed in range(31):
        assert {(engine, seed) for engine in learned.overlaps(prompt(seed))} <= sent
