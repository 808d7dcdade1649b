"""The pure core against answers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_bench.sim.core.blocks import BlockPool
from kvduplex_bench.sim.core.chain import block_hashes, root_of
from kvduplex_bench.sim.core.engine import EngineCore, Removed, Stored
from kvduplex_bench.sim.core.scheduler import Step
from kvduplex_bench.sim.core.sequence import Load, LoadEnd, Phase, Work
from kvduplex_bench.sim.core.timing import Timing, load_timing, profile_names
from kvduplex_bench.sim.errors import ProfileError
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.params import Retention
from kvduplex_transfer.leases.records import Grant


class Clock:
    """Virtual time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(core: EngineCore, clock: Clock, longest: int = 1) -> list[Step]:
    """Run until nothing is left to do; returns the steps."""
    steps: list[Step] = []
    while True:
        step = core.begin(clock.now, longest)
        if step is None:
            due = core.scheduler.next_load()
            if due is None:
                return steps
            clock.now = due
            continue
        clock.now = step.ends
        steps.append(core.end(step))


def work(name: str, prompt: int, output: int = 1, *, of: str | None = None, load: Load | None = None) -> Work:
    """A request whose tokens are those of `of`, one block each of its own."""
    hashes = [f"{of or name}-{at}".encode().ljust(16) for at in range((prompt + output - 1) // 4)]
    return Work(name, prompt, output, hashes, load=load)


def engine(timing: Timing, clock: Clock) -> EngineCore:
    return EngineCore(timing, clock=clock, recording=True)


def test_a_prompt_is_computed_in_chunks_of_the_budget(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    asked = work("a", 40)
    core.submit(asked)
    steps = drive(core, clock)
    assert [sum(count for _, count in step.chunks) for step in steps] == [16, 16, 8]
    assert asked.first_token_at == pytest.approx(3 * 1.0 + 40 * 0.01)
    assert clock.now == pytest.approx(timing.prefill_s(40))


def test_generation_takes_a_step_a_token(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    core.submit(work("a", 8, 5))
    drive(core, clock)
    assert clock.now == pytest.approx(1.08 + 4 * 0.6)
    assert core.counts.generated == 5
    assert core.pool.free == core.pool.total


@pytest.mark.parametrize("longest", [1, 3, 1000])
def test_many_steps_at_once_are_the_same_as_one_by_one(timing: Timing, longest: int) -> None:
    clock = Clock()
    core = engine(timing, clock)
    works = [work(str(n), 8, 3 + 4 * n) for n in range(4)]
    for each in works:
        core.submit(each)
    drive(core, clock, longest)
    one_by_one = 1.0 + 16 * 0.01 + 1.0 + 16 * 0.01  # all four fit two steps of 16, less those that generate
    assert core.counts.finished == 4
    assert clock.now == pytest.approx(_reference(timing))
    assert clock.now > one_by_one


def _reference(timing: Timing) -> float:
    clock = Clock()
    core = engine(timing, clock)
    for n in range(4):
        core.submit(work(str(n), 8, 3 + 4 * n))
    drive(core, clock, 1)
    return clock.now


def test_a_run_of_steps_is_cut_at_the_next_boundary(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    core.submit(work("a", 4, 100))
    core.end(core.begin(0.0))  # type: ignore[arg-type]
    step = core.begin(1.04, 1000)
    assert step is not None
    assert step.count == 99
    core.scheduler.cut(step, 1.04 + 0.6 * 2.5)
    assert step.count == 3
    core.end(step)
    assert core.scheduler.step_number == 4


def test_a_repeated_prompt_is_found_but_for_its_last_token(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    core.submit(work("a", 32))
    drive(core, clock)
    again = work("b", 32, of="a")
    core.submit(again)
    drive(core, clock)
    assert again.local_hits == 28
    assert core.counts.local_hits == 28


def test_the_answer_is_found_by_the_next_turn(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    core.submit(work("a", 16, 9))
    drive(core, clock)
    turn = work("b", 32, of="a")
    core.submit(turn)
    drive(core, clock)
    assert turn.local_hits == 24  # the 25th token's KV was never written


def test_least_recently_used_blocks_go_first_and_are_told(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    for name in ("a", "b"):
        core.submit(work(name, 128))
        drive(core, clock)
    core.submit(work("c", 16))
    drive(core, clock)
    removed = [event for event in core.events if isinstance(event, Removed)]
    assert [bytes(h).strip() for event in removed for h in event.hashes] == [b"a-31", b"a-30", b"a-29", b"a-28"]
    stored = [(event.work.id, event.start, event.end) for event in core.events if isinstance(event, Stored)]
    assert ("c", 0, 4) in stored


def test_a_request_waits_for_blocks(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    first, second = work("a", 200, 3), work("b", 200, 1)
    core.submit(first)
    core.submit(second)
    drive(core, clock)
    assert second.scheduled_at >= first.first_token_at + 2 * 0.6 - 1e-9


def test_aborts_leave_nothing_behind(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    works = [work(str(n), 12, 50) for n in range(6)]
    for each in works:
        core.submit(each)
    for _ in range(4):
        step = core.begin(clock.now)
        assert step is not None
        clock.now = step.ends
        core.end(step)
    phases = {each.phase for each in works}
    assert {Phase.WAITING, Phase.DECODE} <= phases
    for each in works:
        core.abort(each)
    assert drive(core, clock) == []
    assert core.pool.free == core.pool.total
    assert core.scheduler._context == 0


def test_kv_from_elsewhere_is_read_while_others_compute(timing: Timing) -> None:
    clock, ends = Clock(), list[LoadEnd]()
    core = engine(timing, clock)
    pulled = work("a", 33, load=Load(32, timing.back.seconds, reuse_s=lambda _n: 0.25, ended=ends.append))
    core.submit(pulled)
    drive(core, clock)
    assert ends == [LoadEnd.READ]
    assert pulled.external == 32
    assert pulled.first_token_at == pytest.approx(0.2 + 0.032 + 0.6 + 0.25)


def test_too_little_kv_from_elsewhere_is_left_there(timing: Timing) -> None:
    clock, ends = Clock(), list[LoadEnd]()
    core = engine(timing, clock)
    core.submit(work("a", 33, load=Load(8, timing.back.seconds, least_tokens=9, ended=ends.append)))
    drive(core, clock)
    assert ends == [LoadEnd.UNUSED]
    assert core.counts.external == 0


def test_a_lease_keeps_blocks_until_it_is_consumed(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    asked = work("a", 16, 9)
    core.submit(asked, retention=Retention("lease", 100.0))
    drive(core, clock)
    assert core.table.blocks_pinned == 6
    assert core.pool.free == core.pool.total - 6
    grant = core.table.claim((b"p", 1), "lease", HashChain.of(asked.hashes))
    assert isinstance(grant, Grant)
    assert list(grant.blocks) == asked.blocks[:6]
    core.table.finish((b"p", 1), consumed=True)
    core.collect()
    assert core.pool.free == core.pool.total


def test_leases_give_way_to_requests(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    core.submit(work("a", 120, 1), retention=Retention("lease", 400.0))
    drive(core, clock)
    assert core.table.blocks_pinned == 30
    big = work("b", 240)
    core.submit(big)
    drive(core, clock)
    assert big.phase is Phase.FINISHED
    assert core.table.blocks_pinned == 0


def test_blocks_kept_for_a_reader_go_when_nobody_comes(timing: Timing) -> None:
    clock = Clock()
    core = engine(timing, clock)
    core.submit(work("a", 16), send_s=10.0)
    drive(core, clock)
    assert core.readable("a", clock.now) == 16
    clock.now += 11
    assert core.readable("a", clock.now) is None
    assert core.begin(clock.now) is None
    assert core.pool.free == core.pool.total


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 3)), max_size=12), st.integers(1, 9))
def test_every_request_ends_and_every_block_comes_back(asked: list[tuple[int, int, int]], longest: int) -> None:
    timing = load_timing("cpu-tiny")
    clock = Clock()
    core = EngineCore(timing, clock=clock)
    works = [work(str(n), prompt, output, of=f"shared-{of}") for n, (prompt, output, of) in enumerate(asked)]
    for each in works:
        core.submit(each)
    drive(core, clock, longest)
    assert all(each.phase is Phase.FINISHED for each in works)
    assert core.pool.free == core.pool.total
    assert core.counts.generated == sum(each.output_tokens for each in works)
    assert core.scheduler._context == 0


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), max_size=40))
def test_the_pool_counts_references_right(takes: list[list[int]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    for names in takes:
        hits = pool.match(bytes([name]) for name in names)
        blocks = pool.take(hits, len(names) - len(hits))
        if blocks is None:
            assert pool.lacking(hits, len(names) - len(hits)) > 0
            if held:
                pool.release(held.pop(0))
            continue
        for name, block in zip(names[len(hits) :], blocks[len(hits) :], strict=True):
            pool.store(block, bytes([name]))
        held.append(blocks)
        assert pool.free == 8 - len({block for each in held for block in each})
    for each in held:
        pool.release(each)
    assert pool.free == 8


def test_chains_of_equal_tokens_are_equal_and_depend_on_all_before_them() -> None:
    root = root_of("model")
    one, other = block_hashes(list(range(12)), 4, root), block_hashes([9, *range(1, 12)], 4, root)
    assert len(one) == 3
    assert not set(one) & set(other)
    assert block_hashes(list(range(14)), 4, root, one[:2]) == one
    assert block_hashes(list(range(12)), 4, root_of("model", "salt"))[0] != one[0]


def test_every_shipped_profile_loads_and_names_its_sources() -> None:
    names = profile_names()
    assert {"cpu-tiny", "qwen3-32b-p5en", "glm-5-fp8-p5en"} <= set(names)
    for name in names:
        timing = load_timing(name)
        assert timing.name == name
        for section in (timing.prefill, timing.decode, timing.forward, timing.back, timing.reuse):
            assert section.source


def test_a_wrong_profile_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no timing profile 'x'.*cpu-tiny"):
        load_timing("x")
    path = tmp_path / "own.yaml"
    path.write_text("name: own\nspeed: 3\n")
    with pytest.raises(ProfileError, match="speed"):
        load_timing(str(path))
