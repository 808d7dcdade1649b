"""Generated traces are reproducible and share what they say they share; recorded ones are read or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvduplex_bench.traces.generate import GENERATORS, agents, batch, rag
from kvduplex_bench.traces.model import Segment, prompts
from kvduplex_bench.traces.replay import TraceFormatError, load_trace
from kvduplex_bench.traces.text import Writer


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_gives_the_same_trace(name: str) -> None:
    generate = GENERATORS[name]
    assert generate(40, 3) == generate(40, 3)
    assert generate(40, 3) != generate(40, 4)
    assert len({each.id for each in generate(40, 3).conversations}) == 40


def test_agents_share_system_prompts_and_grow_turn_by_turn() -> None:
    trace = agents(200, 1)
    systems = {each.turns[0].new[0].key for each in trace.conversations}
    assert len(systems) <= 12
    for each in trace.conversations:
        lengths = list(prompts(each))
        assert lengths == sorted(lengths)
        assert lengths[-1] <= 32_000
    assert trace.requests > 1000


def test_rag_documents_are_popular_by_rank() -> None:
    trace = rag(2000, 1)
    asked = [seg.key for each in trace.conversations for seg in each.turns[0].new if seg.key.startswith("document")]
    share = sum(key in {f"document-{rank}" for rank in range(24)} for key in asked) / len(asked)
    assert 0.45 < share < 0.65


def test_batch_prompts_share_nothing_and_have_no_arrival_times() -> None:
    trace = batch(100, 1)
    keys = [segment.key for each in trace.conversations for segment in each.turns[0].new]
    assert trace.closed
    assert len(set(keys)) == len(keys)


def test_a_trace_can_be_cut_at_a_time_and_rate() -> None:
    trace = agents(500, 1)
    cut = trace.starting_by(10.0, 5.0)
    assert all(each.start <= 50 for each in cut.conversations)
    assert 30 < len(cut.conversations) < 75


def test_equal_names_are_written_equally_and_others_differently() -> None:
    words = [" alpha", " beta", " gamma", " delta", " epsilon"]
    one, other = Writer(words), Writer(words)
    segment = Segment("tool", "a", 900)
    assert one.message(segment) == other.message(segment)
    assert one.message(segment) != one.message(Segment("tool", "b", 900))
    assert len(one.text(segment).split()) == 900
    assert b'"role": "user"' in one.message(segment)


def test_mooncake_lines_become_requests_that_share_hashed_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 2000, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]}\n\n'
    )
    trace = load_trace(path)
    first, second = trace.conversations
    assert [(seg.key, seg.tokens) for seg in first.turns[0].new] == [("hash-1", 512), ("hash-2", 512), ("hash-3", 76)]
    assert second.turns[0].new[0] == first.turns[0].new[0]
    assert second.start - first.start == pytest.approx(2.0 * 2 / 2.0)  # two requests in two seconds: rate one
    assert second.turns[0].output_tokens == 7


def test_sharegpt_conversations_become_turns(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    path.write_text(
        '[{"id": "a", "conversations": [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "12345678"}'
        ', {"from": "human", "value": "more"}, {"from": "gpt", "value": "ok"}]}, {"conversations": []}]'
    )
    trace = load_trace(path)
    (only,) = trace.conversations
    assert [turn.output_tokens for turn in only.turns] == [2, 1]
    assert only.turns[0].new[0].text == "hello there"
    assert only.turns[0].gap_s == 0.0
    assert only.turns[1].gap_s > 0.0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"timestamp": 1}\n', r"a\.jsonl, line 1.*input_length"),
        ("a.jsonl", "", "is empty"),
        ("a.json", "[", "a.json"),
        ("a.json", '[{"conversations": [{"from": "gpt", "value": "x"}]}]', "no conversation"),
        ("a.json", "\xff", "a.json"),
    ],
)
def test_bad_trace_files_are_refused_by_place(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(TraceFormatError, match=said):
        load_trace(path)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="No such file"):
        load_trace(tmp_path / "none.jsonl")
