"""Traces without arrival times, worked off by clients."""

from __future__ import annotations

import pytest

from kvduplex_bench.sim.core.timing import load_timing
from kvduplex_bench.simulate.fleet import play_replicas
from kvduplex_bench.simulate.routed import play_routed
from kvduplex_bench.traces.generate import batch

TIMING = load_timing("qwen3-32b-h200")
TRACE = batch(120, 1)


def test_clients_have_one_request_each_until_the_trace_is_worked_off() -> None:
    outcomes = play_replicas(TRACE, TIMING, replicas=2, rate=1.0, policy="least", clients=8)
    assert len(outcomes) == 120
    changes = sorted(
        [(each.asked, 1) for each in outcomes] + [(each.asked + each.e2e_s, -1) for each in outcomes],
        key=lambda change: (round(change[0], 9), change[1]),
    )
    open_, most = 0, 0
    for _, change in changes:
        open_ += change
        most = max(most, open_)
    assert most == 8
    assert sorted(each.asked for each in outcomes)[:9].count(0.0) == 8


def test_unique_prompts_end_as_soon_with_this_routers_policies_as_one_after_the_other() -> None:
    def seconds(policy: str) -> float:
        played = play_routed(TRACE, TIMING, replicas=2, rate=1.0, policy=policy, clients=32)
        return max(each.asked + each.e2e_s for each in played)

    in_turns = seconds("round_robin")
    assert all(seconds(policy) < 1.05 * in_turns for policy in ("prefix", "kv_events"))


def test_a_closed_trace_needs_clients() -> None:
    with pytest.raises(ValueError, match="batch has no arrival times: say how many clients"):
        play_replicas(TRACE, TIMING, replicas=2, rate=1.0, policy="least")
