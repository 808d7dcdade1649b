"""What work costs is learned from how long it took."""

from __future__ import annotations

import random

import pytest

from kvduplex_router.routing.cost import EngineCost, EnginePace, Work


def engine(work: Work, *, per_token: float = 2e-4, rng: random.Random) -> float:
    """A made-up engine with noise."""
    exact = 0.02 + per_token * (work.computed + work.ahead) + 0.003 * work.running + 2e-5 * work.pulled
    return exact * rng.uniform(0.9, 1.1)


def works(rng: random.Random, count: int) -> list[Work]:
    return [
        Work(
            rng.randrange(20, 4_000),
            rng.choice([0, 0, rng.randrange(8_000)]),
            rng.randrange(12),
            rng.choice([0, 3_000]),
        )
        for _ in range(count)
    ]


def test_coefficients_are_found_under_noise() -> None:
    rng, cost = random.Random(1), EngineCost()
    for work in works(rng, 400):
        cost.learn(work, engine(work, rng=rng))
    assert cost.per_token == pytest.approx(2e-4, rel=0.1)
    assert cost.per_running == pytest.approx(0.003, abs=0.004)
    assert cost.per_pulled == pytest.approx(2e-5, rel=0.6)
    assert cost.seconds(Work(2_000)) == pytest.approx(0.42, rel=0.1)


def test_an_engine_that_becomes_slower_is_followed() -> None:
    rng, cost = random.Random(2), EngineCost()
    for work in works(rng, 300):
        cost.learn(work, engine(work, rng=rng))
    for work in works(rng, 300):
        cost.learn(work, engine(work, per_token=5e-4, rng=rng))
    assert cost.per_token == pytest.approx(5e-4, rel=0.15)


def test_one_pause_of_the_machine_does_not_undo_what_was_learned() -> None:
    rng, cost = random.Random(3), EngineCost()
    for work in works(rng, 300):
        cost.learn(work, engine(work, rng=rng))
    cost.learn(Work(100), 60.0)
    assert cost.per_token == pytest.approx(2e-4, rel=0.3)


def test_prices_stay_finite_and_positive_whatever_is_fed() -> None:
    rng, cost = random.Random(4), EngineCost()
    for _ in range(3_000):
        work = Work(
            rng.choice([1, 1, 1, 10**7]), rng.choice([0, 10**8]), rng.choice([0, 10**4]), rng.choice([0, 10**7])
        )
        cost.learn(work, rng.choice([0.0, 1e-6, 1e4]))
        price = cost.seconds(Work(1_000, 1_000, 10, 1_000))
        assert 0 <= price < 1e12
        assert cost.per_token > 0


def test_a_feature_that_stays_away_does_not_blow_up() -> None:
    rng, cost = random.Random(5), EngineCost()
    for _ in range(5_000):
        work = Work(rng.randrange(20, 4_000))
        cost.learn(work, engine(work, rng=rng))
    assert cost.per_token == pytest.approx(2e-4, rel=0.1)
    cost.learn(Work(100, pulled=1_000), 0.06)
    assert cost.seconds(Work(1_000)) == pytest.approx(0.22, rel=0.2)


def test_what_others_slow_an_answer_down_is_found_under_noise() -> None:
    rng, pace = random.Random(6), EnginePace()
    for _ in range(600):
        generated, serving = rng.randrange(20, 400), rng.uniform(0, 200_000)
        seconds = generated * (0.02 + 7e-8 * serving) * rng.uniform(0.9, 1.1)
        pace.learn(generated=generated, seconds=seconds, serving=serving)
    assert pace.slowdown_s == pytest.approx(210 * 7e-8, rel=0.3)


def test_slowdowns_stay_finite_and_are_never_negative() -> None:
    rng, pace = random.Random(7), EnginePace()
    for _ in range(3_000):
        pace.learn(
            generated=rng.choice([-1, 0, 1, 16, 10**6]), seconds=rng.choice([0.0, 1e-6, 1e5]),
            serving=rng.choice([0.0, 1e3, 1e9]),
        )  # fmt: skip
        assert 0.0 <= pace.slowdown_s < 1e6


def test_very_short_answers_teach_nothing() -> None:
    pace = EnginePace()
    pace.learn(generated=1, seconds=100.0, serving=1e6)
    assert pace.samples == 0
