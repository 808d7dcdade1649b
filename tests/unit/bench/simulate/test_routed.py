"""The router's own decisions over virtual engines."""

from __future__ import annotations

import msgspec
import pytest

from kvduplex_bench.sim.core.timing import load_timing
from kvduplex_bench.simulate.clockwork import Agenda
from kvduplex_bench.simulate.fleet import Outcome, Player, play_replicas
from kvduplex_bench.simulate.peers import PEERS
from kvduplex_bench.simulate.routed import OWN, RoutedFleet, play_routed
from kvduplex_bench.simulate.sums import sums
from kvduplex_bench.traces.generate import agents
from kvduplex_bench.traces.model import Conversation, Segment, Trace, Turn
from kvduplex_router.config import Policy, RoutingConfig
from kvduplex_router.events.trust import Trust

TIMING = load_timing("qwen3-32b-h200")
TRACE = agents(60, 1)


def cached(outcomes: list[Outcome]) -> int:
    return sum(each.cached_tokens for each in outcomes)


@pytest.mark.parametrize("policy", OWN)
def test_every_turn_is_answered_and_a_run_is_reproducible(policy: str) -> None:
    one, two = (play_routed(TRACE, TIMING, replicas=4, rate=1.5, policy=policy) for _ in range(2))
    assert len(one) == TRACE.requests
    assert one == two


def test_the_index_knows_exactly_what_virtual_engines_hold() -> None:
    small = msgspec.structs.replace(TIMING, kv_blocks=4_000)
    agenda = Agenda()
    fleet = RoutedFleet(small, agenda, replicas=2, config=RoutingConfig(policy=Policy.KV_EVENTS))
    Player(TRACE, 0.5, small.block_size, agenda, fleet.serve).run()
    assert fleet.routing.index.counts.removed > 0
    assert all(fleet.routing.trust(name) is Trust.TRUSTED for name in fleet.routing.engine_names())
    assert sorted(fleet.routing.index.sizes().values()) == sorted(core.pool.cached for core in fleet.cores)
    assert fleet.idle


def test_policies_that_look_at_prompts_find_more_than_those_that_do_not() -> None:
    found = {policy: cached(play_routed(TRACE, TIMING, replicas=4, rate=1.5, policy=policy)) for policy in OWN}
    assert found["kv_events"] > found["session"] > found["round_robin"]
    assert found["prefix"] > found["session"]


def test_a_prompt_that_is_long_in_computing_counts_as_held_until_events_come() -> None:
    """Else whoever comes meanwhile with the same beginning computes it once more at another engine."""
    slow = msgspec.structs.replace(TIMING, prefill=msgspec.structs.replace(TIMING.prefill, per_token_s=5e-3))

    def asked(name: str, start: float, document: str) -> Conversation:
        new = (Segment("system", document, 4_000), Segment("user", name, 50))
        return Conversation(name, "rag", start, (Turn(0.0, new, 4),))

    learning = [asked(f"q{n}", 25.0 * n, f"document {n}") for n in range(12)]
    two = [asked("one", 400.0, "shared"), asked("other", 410.0, "shared")]
    agenda = Agenda()
    fleet = RoutedFleet(slow, agenda, replicas=3, config=RoutingConfig(policy=Policy.KV_EVENTS))
    outcomes = Player(Trace("slow", (*learning, *two), ""), 1.0, slow.block_size, agenda, fleet.serve).run()
    one, other = (each for each in outcomes if each.asked >= 400.0)
    assert one.ttft_s > 15.0, "the other came while this one was computed"
    assert (other.plan, other.cached_tokens) == ("overlap", 4_000)


def test_answers_end_no_later_than_with_sessions_although_shared_beginnings_attract() -> None:
    """Engines that hold a popular beginning must not be sent all of its conversations."""
    trace, window = agents(250, 2), {"begin_s": 20.0, "end_s": 60.0}
    shared, hashed = (
        sums(play_routed(trace, TIMING, replicas=8, rate=4.0, policy=policy), **window)
        for policy in ("kv_events", "session")
    )
    assert shared["ttft_p95_s"] < hashed["ttft_p95_s"]
    assert shared["e2e_mean_s"] < 1.1 * hashed["e2e_mean_s"]


@pytest.mark.parametrize("peer", PEERS)
def test_peers_answer_every_turn(peer: str) -> None:
    outcomes = play_replicas(TRACE, TIMING, replicas=4, rate=1.5, policy=PEERS[peer])
    assert len(outcomes) == TRACE.requests
    assert cached(outcomes) > 0
