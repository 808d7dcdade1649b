"""Bounds: no policy may pass them, and what they count must be what engines do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvduplex_bench.sim.core.sequence import Work
from kvduplex_bench.sim.core.timing import load_timing
from kvduplex_bench.simulate.bounds import all_knowing, play_unhindered
from kvduplex_bench.simulate.clockwork import Agenda, VirtualEngine
from kvduplex_bench.simulate.fleet import POLICIES, Pick, play_replicas
from kvduplex_bench.simulate.sums import sums
from kvduplex_bench.traces.generate import agents

TIMING = load_timing("qwen3-32b-h200")
TRACE = agents(150, 1)
WINDOW = {"begin_s": 10.0, "end_s": 35.0}


def hashes(name: str, blocks: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{i}".encode() for i in range(blocks))


@pytest.mark.parametrize("policy", [*POLICIES, pytest.param(all_knowing, id="all_knowing")])
def test_no_policy_beats_engines_with_nothing_in_the_way(policy: str | Callable[[], Pick]) -> None:
    bound = play_unhindered(TRACE, TIMING, rate=4.0)
    played = play_replicas(TRACE, TIMING, replicas=8, rate=4.0, policy=policy)
    best, real = sums(bound, **WINDOW), sums(played, **WINDOW)
    assert len(bound) == len(played) == TRACE.requests
    assert best["cached"] >= real["cached"]
    for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "e2e_mean_s"):
        assert best[key] < real[key]


def test_knowing_everything_beats_hashing_sessions() -> None:
    knowing, hashed = (
        sums(play_replicas(TRACE, TIMING, replicas=8, rate=4.0, policy=policy), **WINDOW)
        for policy in (all_knowing, "session")
    )
    assert knowing["ttft_p95_s"] < hashed["ttft_p95_s"]
    assert knowing["cached"] > hashed["cached"]


def test_who_holds_the_prompt_gets_it_until_prompts_ahead_cost_more() -> None:
    agenda = Agenda()
    holder, idle = engines = [VirtualEngine(TIMING, agenda) for _ in range(2)]
    pick = all_knowing()
    holder.submit(Work("first", 4_096, 1, hashes("a", 256)), lambda _work, _ends: None)
    agenda.run()
    assert pick("a", Work("again", 4_096, 1, hashes("a", 256)), engines) is holder
    for number in range(4):
        ahead = Work(f"ahead {number}", 4_096, 1, hashes(f"{number}", 256))
        holder.submit(ahead, lambda _work, _ends: None)
    assert pick("a", Work("again", 4_096, 1, hashes("a", 256)), engines) is idle


def test_the_rest_of_a_step_is_that_until_its_next_boundary() -> None:
    agenda = Agenda()
    engine = VirtualEngine(TIMING, agenda)
    engine.submit(Work("long", 1_600, 200, hashes("a", 112)), lambda _work, _ends: None)
    prefill_s = TIMING.prefill_s(1_600)
    assert engine.step_left_s == pytest.approx(prefill_s)
    seen: list[float] = []
    agenda.at(prefill_s / 4, lambda: seen.append(engine.step_left_s))
    agenda.at(prefill_s + 0.1, lambda: seen.append(engine.step_left_s))
    agenda.run()
    assert seen[0] == pytest.approx(prefill_s * 3 / 4)
    assert 0.0 < seen[1] < TIMING.decode_step_s(1, 2_000)
    assert engine.step_left_s == 0.0
