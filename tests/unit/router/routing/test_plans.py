"""Prices of plans, by hand."""

from __future__ import annotations

import pytest

from kvduplex_router.config import Plan
from kvduplex_router.pd.plans import Options, Priced, Side, chosen, price
from kvduplex_router.routing.cost import EngineCost, Work

ALL = frozenset(Plan)


def cost(per_token: float, *, samples: int = 200) -> EngineCost:
    """A model that has learned: 10 ms, `per_token`, 1 ms a running request, a hundredth of that for tokens read."""
    learned = EngineCost()
    for i in range(samples):
        work = Work(50 + 37 * i % 3_000, running=i % 7, pulled=(i % 3) * 500)
        seconds = 0.01 + per_token * work.computed + 0.001 * work.running + per_token / 100 * work.pulled
        learned.learn(work, seconds)
    return learned


@pytest.fixture(scope="module")
def fast() -> EngineCost:
    return cost(1e-4)


def best(options: Options, prefill: Side, decode: Side, usual: Plan = Plan.PULL) -> Plan:
    return chosen(price(options, prefill, decode), usual=usual)[0].plan


def test_a_long_history_is_pulled_and_not_computed_again(fast: EngineCost) -> None:
    options = Options(frozenset({Plan.PULL, Plan.RECOMPUTE}), tokens=10_000, pullable=9_800)
    first, second = price(options, Side(fast), Side(fast, 9_800))
    assert (first.plan, first.cached) == (Plan.PULL, 9_800)
    assert (second.plan, second.cached) == (Plan.RECOMPUTE, 0)
    assert second.seconds - first.seconds == pytest.approx(9_800 * (1e-4 - 1e-6), rel=0.2)


def test_what_the_prefill_engine_holds_itself_is_not_pulled(fast: EngineCost) -> None:
    options = Options(ALL, tokens=10_000, pullable=9_800)
    assert [each.plan for each in price(options, Side(fast, 9_900), Side(fast))].count(Plan.PULL) == 0


def test_an_idle_decode_engine_that_holds_nearly_all_goes_on_alone(fast: EngineCost) -> None:
    options = Options(ALL, tokens=10_000, pullable=9_800)
    assert best(options, Side(fast), Side(fast, 9_800)) is Plan.CONTINUE


def test_a_decode_engine_with_many_answers_to_generate_is_left_in_peace(fast: EngineCost) -> None:
    options = Options(ALL, tokens=10_000, pullable=9_000, continue_max=2_000)
    assert best(options, Side(fast), Side(fast, 9_000, running=64)) is Plan.PULL


def test_more_than_the_limit_is_never_computed_by_continuing(fast: EngineCost) -> None:
    options = Options(ALL - {Plan.AGGREGATE}, tokens=10_000, pullable=5_000, continue_max=1_024)
    assert Plan.CONTINUE not in [each.plan for each in price(options, Side(fast), Side(fast, 5_000))]


def test_plans_that_are_not_allowed_are_not_priced(fast: EngineCost) -> None:
    options = Options(frozenset({Plan.RECOMPUTE}), tokens=10_000, pullable=9_800)
    assert [each.plan for each in price(options, Side(fast), Side(fast, 9_800))] == [Plan.RECOMPUTE]


def test_a_queue_at_the_prefill_engine_counts(fast: EngineCost) -> None:
    options = Options(ALL, tokens=2_000, pullable=0)
    assert best(options, Side(fast, wait_s=5.0), Side(fast), usual=Plan.RECOMPUTE) is Plan.AGGREGATE


def priced(plan: Plan, seconds: float, samples: int = 100) -> Priced:
    return Priced(plan, seconds, seconds, 0, samples)


def test_the_usual_plan_is_left_only_for_one_that_is_clearly_cheaper() -> None:
    near = [priced(Plan.RECOMPUTE, 0.9), priced(Plan.PULL, 1.0)]
    far = [priced(Plan.RECOMPUTE, 0.5), priced(Plan.PULL, 1.0)]
    assert chosen(near, usual=Plan.PULL) == (near[1], near[0])
    assert chosen(far, usual=Plan.PULL) == (far[0], far[1])


def test_what_can_be_pulled_is_not_recomputed_on_little_evidence() -> None:
    few = [priced(Plan.RECOMPUTE, 0.1, samples=3), priced(Plan.PULL, 1.0)]
    assert chosen(few, usual=Plan.PULL)[0].plan is Plan.PULL


def test_the_only_plan_has_no_runner_up() -> None:
    only = [priced(Plan.RECOMPUTE, 1.0)]
    assert chosen(only, usual=Plan.RECOMPUTE) == (only[0], None)
