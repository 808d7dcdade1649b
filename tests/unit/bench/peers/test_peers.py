"""Other clients' result files, as they write them, and when two clients agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvduplex_bench.app import app
from kvduplex_bench.errors import BenchError
from kvduplex_bench.peers.clients import Task, read_aiperf, read_vllm, run_aiperf
from kvduplex_bench.peers.observed import Observed, agreement


def test_vllm_requests_without_an_answer_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"ttfts": [0.5, 0.0], "itls": [[0.1, 0.3], []], "errors": ["", "gone"]}))
    assert read_vllm(path) == [Observed(0.5, 0.2, 0.9)]


def aiperf_row(turn: int, ttft_ms: float, error: object = None) -> str:
    metrics = {
        "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
        "inter_token_latency": {"value": 20.0, "unit": "ms"},
        "request_latency": {"value": ttft_ms + 100, "unit": "ms"},
    }
    row = {"metadata": {"turn_index": turn, "benchmark_phase": "profiling"}, "metrics": {} if error else metrics}
    return json.dumps(row | {"error": error}) + "\n"


def test_aiperf_counts_further_turns_where_there_are_some(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    path.write_text(aiperf_row(0, 900) + aiperf_row(1, 100) + aiperf_row(1, 0, {"message": "gone"}))
    assert read_aiperf(path) == [Observed(0.1, 0.02, 0.2)]
    path.write_text(aiperf_row(0, 900))
    assert read_aiperf(path) == [Observed(0.9, 0.02, 1.0)]


@pytest.mark.parametrize("read", [read_vllm, read_aiperf])
@pytest.mark.parametrize("content", ["", "{}\n", "nonsense\n", '{"metadata": {}, "metrics": {}}\n'])
def test_other_files_are_refused_by_name(tmp_path: Path, read: object, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(BenchError, match="file: not a"):
        read(path)  # type: ignore[operator]


def rounds(*medians: float) -> list[list[Observed]]:
    return [[Observed(m, m, m)] for m in medians]


def test_clients_agree_within_our_own_noise() -> None:
    found = agreement("ttft_s", rounds(1.0, 1.1, 1.2), rounds(1.05, 1.2, 1.3))
    assert found.noise == pytest.approx(0.2 / 1.1)
    assert found.ratio == pytest.approx(1.3 / 1.2)
    assert found.verdict == "agree"
    assert agreement("ttft_s", rounds(1.0, 1.0), rounds(1.06, 1.06)).verdict == "DIFFER"
    assert agreement("ttft_s", rounds(1.0, 1.0), rounds(1.04, 1.04)).verdict == "agree"


def test_rounds_that_scatter_tell_nothing() -> None:
    assert agreement("ttft_s", rounds(1.0, 2.0), rounds(1.2, 2.2)).verdict == "too noisy to tell"


def test_rounds_without_requests_are_not_compared() -> None:
    with pytest.raises(BenchError, match="without answered requests"):
        agreement("ttft_s", [[]], rounds(1.0))
    with pytest.raises(BenchError, match="is 0"):
        agreement("itl_s", rounds(0.0), rounds(1.0))


@pytest.mark.parametrize(("program", "message"), [("no-such-program", "no such program"), (sys.executable, "status 2")])
def test_a_client_that_cannot_be_run_is_said(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        run_aiperf(Task("http://127.0.0.1:1", "m", "t", [["hello"]], 5, tmp_path), program)


def test_a_cluster_has_to_be_given() -> None:
    done = CliRunner().invoke(app, ["peers"])
    assert done.exit_code == 1
    assert "or --serve cpu" in done.output
