"""The virtual fleet against answers worked out by hand, the published times, and itself."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvduplex_bench.app import app
from kvduplex_bench.sim.core.timing import Decode, Prefill, Reuse, Timing, Transfer, load_timing
from kvduplex_bench.simulate.clockwork import Agenda
from kvduplex_bench.simulate.content import ContentChain
from kvduplex_bench.simulate.fleet import Outcome, Player, play_replicas
from kvduplex_bench.simulate.pd import Leasing, PdFleet, PdSettings
from kvduplex_bench.simulate.published import PUBLISHED, Point, replay
from kvduplex_bench.simulate.sums import sums
from kvduplex_bench.traces.generate import agents
from kvduplex_bench.traces.model import Conversation, Segment, Trace, Turn

TIMING = Timing(
    name="round", about="", model="m", max_model_len=10_000, block_size=10, kv_blocks=1000, kv_bytes_per_token=1,
    max_num_seqs=16, max_num_batched_tokens=1000,
    prefill=Prefill(step_s=0.0, per_token_s=0.01, source=""), decode=Decode(step_s=0.1, source=""),
    forward=Transfer(setup_s=0.5, per_token_s=0.0, source=""), back=Transfer(setup_s=0.25, per_token_s=0.0, source=""),
    reuse=Reuse(source=""),
)  # fmt: skip


def two_turns(gap_s: float = 1.0) -> Trace:
    """A hundred tokens, an answer of eleven; then 89 more tokens, and an answer of eleven."""
    first = Turn(0.0, (Segment("user", "a", 100),), 11)
    second = Turn(gap_s, (Segment("user", "b", 89),), 11)
    return Trace("two", (Conversation("c", "chat", 0.0, (first, second)),), "")


def play(settings: PdSettings, trace: Trace) -> tuple[list[Outcome], PdFleet]:
    agenda = Agenda()
    fleet = PdFleet(settings, agenda)
    return Player(trace, 1.0, settings.timing.block_size, agenda, fleet.serve).run(), fleet


def test_a_replica_computes_only_what_its_cache_lacks() -> None:
    first, second = play_replicas(two_turns(), TIMING, replicas=1, rate=1.0, policy="round_robin")
    assert first.ttft_s == pytest.approx(1.0)
    assert first.e2e_s == pytest.approx(1.0 + 10 * 0.1)
    assert second.asked == pytest.approx(3.0)
    assert (second.prompt_tokens, second.cached_tokens) == (200, 110)
    assert second.ttft_s == pytest.approx(0.9)


def test_round_robin_loses_what_session_affinity_finds() -> None:
    lost = play_replicas(two_turns(), TIMING, replicas=2, rate=1.0, policy="round_robin")
    found = play_replicas(two_turns(), TIMING, replicas=2, rate=1.0, policy="session")
    assert lost[1].cached_tokens == 0
    assert found[1].cached_tokens == 110


@pytest.mark.parametrize(
    ("plan", "ttft_s", "cached"),
    [
        ("recompute", 2.0 + 0.5 + 0.1, 0),  # 200 tokens, the new KV over, one token
        ("pull", 0.25 + 0.9 + 0.5 + 0.1, 110),  # 110 tokens come back, 90 are computed
        ("continue", 0.9, 110),  # the decode engine has 110 and computes 90 itself
    ],
)
def test_the_plans_of_a_second_turn_cost_what_they_should(plan: str, ttft_s: float, cached: int) -> None:
    outcomes, fleet = play(PdSettings(TIMING, 1, 1, plan=plan, prefill_caching=False), two_turns())
    assert outcomes[0].ttft_s == pytest.approx(1.0 + 0.5 + 0.1)
    assert outcomes[1].plan == plan
    assert outcomes[1].ttft_s == pytest.approx(ttft_s)
    assert outcomes[1].cached_tokens == cached
    assert all(engine.core.kept_for_readers == 0 for engine in fleet.prefill)


def test_a_lease_that_ran_out_is_recomputed_and_a_renewed_one_is_not() -> None:
    short = Leasing(ttl_s=5.0, longest_s=100.0)
    renewed = Leasing(ttl_s=5.0, renews=2.0, longest_s=100.0)
    for leasing, plan in ((short, "recompute"), (renewed, "pull")):
        settings = PdSettings(TIMING, 1, 1, prefill_caching=False, leasing=leasing)
        outcomes, _ = play(settings, two_turns(gap_s=30.0))
        assert outcomes[1].plan == plan


def test_too_few_tokens_are_not_pulled() -> None:
    settings = PdSettings(TIMING, 1, 1, prefill_caching=False, threshold=111)
    outcomes, fleet = play(settings, two_turns())
    assert outcomes[1].cached_tokens == 0
    assert fleet.decode[0].core.table.counts().claim_ends["returned"] == 1


@pytest.mark.parametrize("point", PUBLISHED, ids=lambda each: f"{each.profile} {each.prefix} {each.reuse}")
def test_profiles_reproduce_the_published_times_within_a_tenth(point: Point) -> None:
    ttft_s, prefill_s = replay(load_timing(point.profile), point.prefix, reuse=point.reuse)
    assert ttft_s * 1000 == pytest.approx(point.ttft_ms, rel=0.1)
    assert prefill_s * 1000 == pytest.approx(point.prefill_ms, rel=0.1)


@pytest.mark.parametrize("policy", ["round_robin", "least", "session", "overlap"])
def test_every_turn_is_answered_and_a_run_is_reproducible(policy: str) -> None:
    trace = agents(30, 5)
    timing = load_timing("qwen3-32b-h200")
    one, other = (play_replicas(trace, timing, replicas=3, rate=1.0, policy=policy) for _ in range(2))
    assert one == other
    assert len(one) == trace.requests
    assert sum(each.output_tokens for each in one) == trace.output_tokens


def test_memory_pressure_costs_cached_tokens_and_nothing_else() -> None:
    trace, base = agents(60, 2), load_timing("qwen3-32b-h200")
    cached = []
    for blocks in (2600, 30_000):
        timing = msgspec.structs.replace(base, kv_blocks=blocks)
        outcomes = play_replicas(trace, timing, replicas=2, rate=1.0, policy="session")
        assert len(outcomes) == trace.requests
        cached.append(sum(each.cached_tokens for each in outcomes))
    assert cached[0] < cached[1]


parts = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=8)


@given(parts, parts)
def test_named_content_hashes_as_its_tokens_would(one: list[tuple[str, int]], other: list[tuple[str, int]]) -> None:
    """Equal blocks exactly where the spelled-out tokens agree; a name's tokens are its places from its start."""

    def spelled(content: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return [(name, place) for name, tokens in content for place in range(tokens)]

    def chain(content: list[tuple[str, int]]) -> ContentChain:
        built = ContentChain(7)
        for name, tokens in content:
            built.add(name, tokens)
        return built

    mine, others = chain(one), chain(other)
    assert mine.tokens == len(spelled(one))
    assert len(mine.hashes) == mine.tokens // 7
    common = 0
    for left, right in zip(spelled(one), spelled(other), strict=False):
        if left != right:
            break
        common += 1
    agreeing = sum(left == right for left, right in zip(mine.hashes, others.hashes, strict=False))
    assert agreeing <= common // 7
    if one == other:
        assert agreeing == len(mine.hashes)


def test_sums_count_the_window() -> None:
    outcomes = [Outcome("x", at, 1.0 + at, 2.0, 100, 25, 10, "pull") for at in (0.0, 1.0, 2.0, 9.0)]
    row = sums(outcomes, begin_s=1.0, end_s=5.0)
    assert row["turns"] == 2
    assert row["cached"] == 0.25
    assert row["ttft_mean_s"] == 2.5
    assert row["tokens_per_s"] == pytest.approx(30 / 4)
    assert row["plans"] == {"pull": 2}


def test_the_command_prints_and_writes_a_study(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(app, ["simulate", "--study", "published", "--output", str(output)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == len(PUBLISHED)
    assert all(row["assumes"] for row in rows)


def test_an_unknown_study_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(app, ["simulate", "--study", "nothing"])
    assert done.exit_code == 1
    assert "published" in done.output
