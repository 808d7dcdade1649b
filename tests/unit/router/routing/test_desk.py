"""An engine's figures: what a request adds is taken away again, whichever way it ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.config import BreakerConfig
from kvduplex_router.fleet.breaker import Breaker
from kvduplex_router.fleet.engine import Engine, EngineAddress, EngineRole
from kvduplex_router.http.pool import Origin, Pool, Timeouts
from kvduplex_router.http.watchdog import Watchdog
from kvduplex_router.routing.desk import Desks, Reservation

DEEDS = st.lists(st.sampled_from(["first", "computed_by_now", "end", "learn"]), max_size=6)


def engine(name: str = "10.0.0.1", role: EngineRole = EngineRole.REPLICA) -> Engine:
    origin, limits = Origin("http", name, 8000), BreakerConfig()
    return Engine(
        EngineAddress(origin.authority, role, origin, (name,)),
        pool=Pool(origin, timeouts=Timeouts(), watchdog=Watchdog()),
        breaker=Breaker(failures=limits.failures, open_s=limits.open_s, clock=lambda: 0.0),
    )


@given(st.lists(DEEDS, max_size=6))
def test_nothing_stays_in_the_figures_of_an_engine(requests: list[list[str]]) -> None:
    times = itertools.count()
    clock = lambda: float(next(times))  # noqa: E731
    one = engine()
    desk = Desks(clock).of(one)
    for deeds in requests:
        reservation = Reservation(desk, one, 700, 100, 1_000, clock)
        assert desk.serving_tokens == 1_000
        for deed in deeds:
            if deed == "learn":
                reservation.learn(1_000, 300, 50)
            else:
                getattr(reservation, deed)()
        reservation.end()
        assert (desk.serving_tokens, desk.pending_tokens, desk.pending) == (0, 0, 0)
    assert desk.computed_tokens == 700 * len(requests)


def test_time_in_which_prompts_were_computed_does_not_count_as_slow_generation() -> None:
    now = [0.0]
    one, clock = engine(), lambda: now[0]
    desks = Desks(clock)
    desk = desks.of(one)
    for _ in range(200):
        answer = Reservation(desk, one, 1_000, 0, 20_000, clock)
        now[0] += desk.prices.per_token * 1_000
        answer.first()
        prompt = Reservation(desk, one, 10_000, 0, 20_000, clock)
        now[0] += desk.prices.per_token * 10_000
        prompt.first()
        prompt.end()
        now[0] += 100 * 0.02
        answer.learn(20_000, 19_000, 101)
        answer.end()
    assert desk.pace.slowdown_s * 20_000 == pytest.approx(0.0, abs=0.3)


@pytest.mark.parametrize("role", EngineRole)
def test_only_engines_that_generate_answers_slow_answers_down(role: EngineRole) -> None:
    one = engine(role=role)
    desk = Desks(lambda: 0.0).of(one)
    Reservation(desk, one, 1_000, 0, 20_000, lambda: 0.0)
    assert (desk.slowdown_s > 0.0) == (role is not EngineRole.PREFILL)
