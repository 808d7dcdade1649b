"""The command against a scripted router: whole runs, stopped runs, and what cannot be run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from kvduplex_bench.app import app
from kvduplex_bench.multiturn.journal import read_lines
from kvduplex_bench.multiturn.results import load
from kvduplex_bench.multiturn.workload import Arm

if TYPE_CHECKING:
    from tests.unit.bench.multiturn.conftest import ScriptedRouter

SMALL = ["--conversations", "3", "--turns", "3", "--clients", "2", "--active", "2", "--prefixes", "100,200"]
SMALL += ["--user-tokens", "10", "--answer-tokens", "4", "--repeats", "2", "--warm-up", "0.3"]


def bench(router: ScriptedRouter, output: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["multiturn", "--url", router.url, "--output", str(output), *SMALL, *more])


def streamed(router: ScriptedRouter) -> list[dict[str, Any]]:
    """The turns; calibration and warm-up are asked for whole answers."""
    return [body for body in router.bodies if body["stream"]]


def test_a_whole_run(router: ScriptedRouter, tmp_path: Path) -> None:
    done = bench(router, tmp_path / "run.jsonl")
    assert done.exit_code == 0, done.output
    results = load(tmp_path / "run.jsonl")
    assert results.complete
    for prefix in (100, 200):
        for arm, plan in ((Arm.OFF, "recompute"), (Arm.ON, "pull")):
            cell = results.cell("cluster", prefix, arm)
            assert cell is not None
            assert len(cell.turns) == 2 * 3 * 2  # repeats, conversations, turns after the warm-up
            assert {turn.plan for turn in cell.turns} == {plan}
            assert cell.itl is not None
            assert cell.itl.count == len(cell.turns) * 3
    (opening,) = results.runs
    assert {"versions", "host", "date", "command", "workload"} <= opening.keys()


def test_conversations_grow_by_one_turn_at_a_time_under_one_id(router: ScriptedRouter, tmp_path: Path) -> None:
    bench(router, tmp_path / "run.jsonl", "--arms", "on", "--repeats", "1", "--prefixes", "100")
    told: dict[str, list[int]] = {}
    for body in streamed(router):
        told.setdefault(body["conversation_id"], []).append(len(body["messages"]))
    assert list(told.values()) == [[2, 4, 6]] * 3
    prefixes = {body["messages"][0]["content"] for body in streamed(router)}
    assert len(prefixes) == 1


def test_every_conversation_can_have_a_prefix_of_its_own_and_be_recognised(
    router: ScriptedRouter, tmp_path: Path
) -> None:
    more = ("--arms", "on", "--repeats", "1", "--prefixes", "100", "--no-shared-prefix", "--no-explicit-ids")
    bench(router, tmp_path / "run.jsonl", *more)
    assert not any("conversation_id" in body for body in streamed(router))
    assert len({body["messages"][0]["content"] for body in streamed(router)}) == 3


def test_a_stopped_run_is_partial_and_goes_on_where_it_was(router: ScriptedRouter, tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    arguments = ["multiturn", "--url", router.url, "--output", str(output), *SMALL]
    command = [sys.executable, "-c", "from kvduplex_bench.app import app; app()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        router.before = lambda number: process.send_signal(signal.SIGTERM) if number == 25 else None
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "The same command goes on" in said
    assert not load(output).complete
    router.before = lambda _: None
    again = bench(router, output)
    assert again.exit_code == 0, again.output
    results = load(output)
    assert (results.complete, len(results.runs)) == (True, 2)
    closed = Counter(line["segment"] for line in read_lines(output) if line["kind"] == "segment")
    assert set(closed.values()) == {1}
    assert len(closed) == 2 * 2 * 2


def test_a_complete_run_is_not_played_again(router: ScriptedRouter, tmp_path: Path) -> None:
    bench(router, tmp_path / "run.jsonl")
    before = len(router.bodies)
    assert bench(router, tmp_path / "run.jsonl").exit_code == 0
    assert len(router.bodies) == before


def test_turns_that_fail_are_counted_and_a_dead_router_ends_the_run(router: ScriptedRouter, tmp_path: Path) -> None:
    router.fail_from = 12
    done = bench(router, tmp_path / "run.jsonl", "--conversations", "20")
    assert done.exit_code == 1
    assert "10 turns of one segment failed" in done.output
    end = list(read_lines(tmp_path / "run.jsonl"))[-1]
    assert (end["kind"], end["complete"]) == ("end", False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arms", "off,sideways"], "sideways is unknown"),
        (["--prefixes", "2k"], "write numbers of tokens"),
        (["--prefixes", "40000"], "a context grows to"),
        (["--arms", "floor"], "name them with --prefill"),
        (["--arms", "continue"], "needs --continue-url"),
        (["--prefill", "http://127.0.0.1:1"], "is the engine or router running?"),
        (["--model", "other"], "serves m; name one"),
        (["--serve", "cpu"], "starts its own cluster"),
        (["--api-key-env", "KVDUPLEX_NO_SUCH_VARIABLE"], "is not set"),
    ],
)
def test_what_cannot_be_run_is_said(router: ScriptedRouter, tmp_path: Path, more: list[str], message: str) -> None:
    done = bench(router, tmp_path / "run.jsonl", *more)
    assert done.exit_code == 1
    assert message in done.output


def test_an_engine_without_the_connector_is_refused(router: ScriptedRouter, tmp_path: Path) -> None:
    router.metrics = "# TYPE up gauge\nup 1\n"
    done = bench(router, tmp_path / "run.jsonl", "--prefill", router.url)
    assert done.exit_code == 1
    assert "runs without a NIXL connector" in done.output


def test_floor_is_refused_when_prefill_keeps_no_cache(router: ScriptedRouter, tmp_path: Path) -> None:
    router.metrics = (
        "# TYPE vllm:nixl_x counter\nvllm:nixl_x_total 0\n"
        '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{enable_prefix_caching="False"} 1\n'
    )
    done = bench(router, tmp_path / "run.jsonl", "--prefill", router.url, "--arms", "on,floor")
    assert done.exit_code == 1
    assert "these run without one" in done.output


def test_nobody_at_the_url(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["multiturn", "--url", "http://127.0.0.1:1", "--output", str(tmp_path / "r.jsonl")])
    assert done.exit_code == 1
    assert "cannot be reached" in done.output


def metrics(requests: int) -> str:
    """Of an engine with a connector and a prefix cache that finished so many requests."""
    values = {
        "vllm:request_prefill_time_seconds_count": requests,
        "vllm:request_prefill_time_seconds_sum": 0.25 * requests,
        "vllm:nixl_xfer_time_seconds_sum": 0,
        'vllm:cache_config_info{enable_prefix_caching="True"}': 1,
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())


def test_floor_fills_the_cache_before_each_turn_and_counts_only_the_turn(
    router: ScriptedRouter, tmp_path: Path
) -> None:
    router.metrics = metrics(0)
    router.before = lambda number: setattr(router, "metrics", metrics(number + 1))
    more = ("--prefill", router.url, "--arms", "floor", "--repeats", "1", "--prefixes", "100")
    done = bench(router, tmp_path / "run.jsonl", *more, "--clients", "1")
    assert done.exit_code == 0, done.output
    cell = load(tmp_path / "run.jsonl").cell("cluster, prefill cache on", 100, Arm.FLOOR)
    assert cell is not None
    assert cell.counted.requests == len(cell.turns) == 6
    assert cell.counted.prefill_s == pytest.approx(1.5)
    filled = [body["messages"] for body in router.bodies if not body["stream"] and len(body["messages"]) > 2]
    measured = [body["messages"] for body in streamed(router) if len(body["messages"]) > 2]
    histories = [messages[:-1] for messages in measured]
    assert all(messages[-1]["role"] == "assistant" for messages in histories)
    assert sorted(map(str, histories)) == sorted(
        str(messages) for messages in filled if messages[0]["role"] == "system"
    )
