"""A record with known times, read back, judged and drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvduplex_bench.app import app
from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.checks import checks
from kvduplex_bench.multiturn.engines import Counted
from kvduplex_bench.multiturn.exact import Verdict, compare
from kvduplex_bench.multiturn.results import load
from kvduplex_bench.multiturn.workload import Arm

OFF, ON = "leased, prefill cache off", "leased, prefill cache on"
Record = Callable[..., Path]


def test_cells_hold_the_counted_turns_of_all_repeats(record: Record) -> None:
    results = load(record())
    cell = results.cell(OFF, 8_000, Arm.OFF)
    assert cell is not None
    assert cell.repeat_ttft_s == pytest.approx([7.2, 8.0, 10.4])
    assert cell.ttft.p50 == pytest.approx(8.0)
    assert cell.ttft.count == 3
    assert cell.itl is not None
    assert cell.itl.p50 == pytest.approx(0.03)
    assert cell.prompt_tokens == 8_150
    assert results.complete


def test_prefill_time_is_split_so_that_the_parts_add_up(record: Record) -> None:
    cell = load(record()).cell(OFF, 8_000, Arm.ON)
    assert cell is not None
    split = cell.split
    assert split is not None
    total = split.recompute_s + split.transfer_s + split.claim_s + split.queue_s
    mean = 0.18 * (0.9 + 1.0 + 1.3) / 3
    assert split.recompute_s == pytest.approx(0.8 * mean)
    assert split.claim_s == pytest.approx(0.002)
    assert total == pytest.approx(0.9 * mean)


def test_nothing_counted_has_no_parts() -> None:
    assert Counted().split is None


def test_reading_takes_the_bandwidth_of_the_median_read(record: Record) -> None:
    assert load(record()).read_s(OFF, 1_000_000) == pytest.approx(0.001)


def test_checks_say_what_the_times_say(record: Record) -> None:
    found = {check.what: check for check in checks(load(record()))}
    ratio = found[f"TTFT off/on at the longest prefix, 8,000 tokens ({OFF})"]
    assert (ratio.seen, ratio.holds) == ("44.4", True)
    near = found[f"TTFT on, 8,000 tokens ({OFF}), against 1.2 x floor + bytes / bandwidth"]
    assert (near.seen, near.bar, near.holds) == ("180 ms", "at most 128 ms", False)
    assert found[f"TTFT on/off, 2,000 tokens ({ON})"].holds
    assert found["CPU of the benchmark's client"].seen == "1.0% of a core"
    assert found[f"Tokens read from decode engines a turn ({OFF})"].seen == "5,000"
    assert found["Answers equal to a plain engine's"].seen == "4 of 4"


def test_turns_of_a_segment_that_was_not_closed_do_not_count(record: Record) -> None:
    whole, cut = load(record()), load(record(partial=True, drop_last=2))
    assert not cut.complete
    assert cut.unclosed == 2
    last = (ON, 8_000, Arm.FLOOR)
    assert len(cut.cells[last].turns) == len(whole.cells[last].turns) - 1


def test_a_record_without_turns_is_refused(record: Record, tmp_path: Path) -> None:
    path = record()
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(BenchError, match="holds no measured turn"):
        load(path)


def test_a_garbled_line_is_named(record: Record) -> None:
    path = record()
    path.write_text(path.read_text() + '{"kind": "segment", "segment": "x"}\n')
    with pytest.raises(BenchError, match="a segment line lacks or garbles 'arm'"):
        load(path)


def test_figures_and_a_page_that_fetches_nothing(record: Record, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plot", str(record()), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "index.html", "tables.md", "ttft.png", "ttft.svg", "prefill-split.png", "prefill-split.svg",
        "reuse-over-time.png", "reuse-over-time.svg",
    }  # fmt: skip
    assert all((tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG" for name in names if name.endswith("png"))
    tables = (tmp_path / "out" / "tables.md").read_text()
    assert "| 8,000 | off | 8,000 (7,200 to 10,400) |" in tables
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<svg") == 3
    assert "time to first token (s)" in page
    assert "2 cores X" in page
    assert "Partial" not in page
    for fetched in ("<script", "<link", "src=", "@import", "url(http"):
        assert fetched not in page


def test_a_partial_run_is_drawn_and_says_so(record: Record, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plot", str(record(partial=True)), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert "Partial" in (tmp_path / "out" / "index.html").read_text()
    assert "PARTIAL RUN" in (tmp_path / "out" / "ttft.svg").read_text()


@pytest.mark.parametrize("content", [None, "", '{"kind":"run"}\n'])
def test_nothing_is_drawn_from_nothing(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    done = CliRunner().invoke(app, ["plot", str(path), "--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert not (tmp_path / "out").exists()


def said(*tokens: tuple[str, float, float]) -> dict[str, object]:
    content = [
        {"token": token, "logprob": first, "top_logprobs": [{"logprob": first}, {"logprob": second}]}
        for token, first, second in tokens
    ]
    return {"choices": [{"logprobs": {"content": content}}]}


A, B = ("a", -0.1, -3.0), ("b", -0.2, -2.0)


@pytest.mark.parametrize(
    ("answer", "reference", "verdict", "tokens"),
    [
        (said(A, B), said(A, B), Verdict.EQUAL, 2),
        (said(A, ("b", -0.2001, -2.0)), said(A, B), Verdict.EQUAL, 2),
        (said(A, ("b", -0.3, -2.0)), said(A, B), Verdict.DIFFERENT, 2),
        (said(A, ("c", -0.2, -2.0)), said(A, B), Verdict.DIFFERENT, 1),
        (said(A, ("c", -0.7, -0.7)), said(A, ("b", -0.7, -0.7001)), Verdict.TIE, 1),
        (said(A), said(A, B), Verdict.DIFFERENT, 1),
    ],
)
def test_answers_are_compared_token_by_token(
    answer: dict[str, object], reference: dict[str, object], verdict: Verdict, tokens: int
) -> None:
    found = compare(answer, reference)
    assert (found.verdict, found.tokens) == (verdict, tokens)


def test_answers_without_log_probabilities_cannot_be_compared() -> None:
    with pytest.raises(BenchError, match="without log probabilities"):
        compare({"choices": [{}]}, said(A))
