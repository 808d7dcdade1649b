"""The comparison's sums against known answers, its client against odd servers, and one comparison end to end."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvduplex_bench.app import app
from kvduplex_bench.errors import BenchError
from kvduplex_bench.routing.arms import Started, ours, peers
from kvduplex_bench.routing.churn import Deed, judge
from kvduplex_bench.routing.client import Reply, ask
from kvduplex_bench.routing.load import BEARABLE_P95_S, bearable_rate
from kvduplex_bench.routing.play import Playback, Played
from kvduplex_bench.routing.ports import run_of_ports
from kvduplex_bench.routing.processes import SimProcess
from kvduplex_bench.routing.report import as_lines, churn_table, plot
from kvduplex_bench.routing.run import Comparison, Fleet, compare
from kvduplex_bench.routing.stats import EngineSums, percentile, summarise
from kvduplex_bench.sim.core.timing import load_timing
from kvduplex_bench.simulate.fleet import play_replicas
from kvduplex_bench.traces.generate import agents, batch


def turn(asked: float, ttft_s: float, *, error: str = "", e2e_s: float = 1.0) -> Played:
    return Played("agents", asked, ttft_s, e2e_s, 100, 50, 10, 0 if error else 200, error)


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.95) == 5.0
    assert percentile(values, 0.2) == 1.0
    assert percentile([], 0.5) == 0.0


def test_only_the_counted_window_counts() -> None:
    played = [turn(5, 9.0), turn(10, 1.0), turn(15, 3.0), turn(18, 0.0, error="broken"), turn(20, 9.0)]
    sums = EngineSums(1000, 500, 100, 3.0, 30, 0.2).since(EngineSums(200, 100, 0, 1.0, 10, 0.1))
    found = summarise(played, sums, begin_s=10, end_s=20)
    assert (found.requests, found.failed) == (2, 1)
    assert found.ttft_mean_s == 2.0
    assert found.ttft_p95_s == 3.0
    assert found.cached_share == pytest.approx(500 / 800)
    assert found.late_s == pytest.approx(0.1)
    assert found.lag_s == 0.2
    assert found.believable(1.0)
    assert not found.believable(0.4)  # at that scale a mean TTFT of 2 s passes in 0.8 s
    assert found.requests_per_s == pytest.approx(2 / 10)
    assert found.output_tokens_per_s == pytest.approx(20 / 10)


STARTED = Started(
    [
        {"role": "prefill", "url": "http://p", "entry": "http://p#x", "kv_events": "h:1", "kv_replay": "h:2"},
        {"role": "decode", "url": "http://d", "entry": "http://d#lease=h:3", "kv_events": "h:4", "kv_replay": "h:5"},
    ],
    Path("tokenizer"), 16, "model",
)  # fmt: skip


def test_our_router_is_told_the_policy_and_every_engine() -> None:
    command = ours(["kv_events"])[0].command(STARTED, 80, 81)
    assert command[command.index("--policy") + 1] == "kv_events"
    assert command[command.index("--tokenizer") + 1] == "tokenizer"
    assert command[command.index("--decode") + 1] == "http://d#lease=h:3"
    assert "--tokenizer" not in ours(["session"])[0].command(STARTED, 80, 81)


def test_the_peer_is_told_events_where_its_policy_wants_them() -> None:
    aware, plain = peers("vllm-router", ["kv_aware", "cache_aware"])
    command = aware.command(STARTED, 80, 81)
    assert command[command.index("--pd-kv-events") + 1] == "http://p=tcp://h:1"
    assert aware.environment(STARTED) == {"VLLM_ROUTER_TOKENIZER": "tokenizer"}
    assert "--pd-kv-events" not in plain.command(STARTED, 80, 81)
    assert plain.environment(STARTED) == {}


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", ""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "connection lost"),
        (b"nonsense\r\n\r\n", "not HTTP"),
        (b"", "connection lost"),
    ],
)
async def test_the_client_says_how_an_answer_failed(sent: bytes, error: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(len(sent)):  # one byte a time
            writer.write(sent[at : at + 1])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reply = await ask(port, b"{}", {}, timeout_s=10)
    assert error in reply.error
    assert reply.good is (not error)
    if reply.good:
        assert bytes(reply.body) == b"ok"
        assert reply.asked <= reply.first <= reply.ended


async def test_the_client_gives_up_in_time_and_says_when_nobody_listens() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert "no complete answer within 0.1 s" in (await ask(port, b"{}", {}, timeout_s=0.1)).error
    assert "not connected" in (await ask(port, b"{}", {}, timeout_s=5)).error


def test_the_bearable_rate_is_where_session_affinity_fills_the_fleet() -> None:
    trace, timing = agents(150, 1), load_timing("qwen3-32b-h200")
    rate = bearable_rate(trace, timing, replicas=1)
    assert 0 < rate < 4

    def p95(at: float) -> float:
        outcomes = play_replicas(trace.starting_by(120, at), timing, replicas=1, rate=at, policy="session")
        return percentile([each.ttft_s for each in outcomes if 30 < each.asked < 120], 0.95)

    assert p95(rate) < BEARABLE_P95_S


def test_a_comparison_runs_and_is_written_down(tokenizer: Path, tmp_path: Path) -> None:
    fleet = Fleet("2 replicas", replicas=2)
    comparison = Comparison(batch(24, 1), fleet, "qwen3-32b-h200", tokenizer, time_scale=0.1)
    done: list[str] = []
    result, other = compare(
        comparison,
        ours(["round_robin", "least_in_flight"]),
        at_once=2,
        on_result=lambda each: done.append(each.arm.name),
    )
    assert other.arm.policy == "least_in_flight"
    assert sorted(done) == ["kvduplex least_in_flight", "kvduplex round_robin"]
    assert (result.summary.requests, result.summary.failed) == (24, 0)
    assert result.summary.ttft_mean_s > 0.1  # 600 tokens and more at 132 µs each
    assert result.summary.cached_share < 0.05
    lines = as_lines([result], {"date": "today"})
    row = json.loads(lines)
    assert row["arm"] == "kvduplex round_robin"
    assert len(row["ttft_s"]) == 100
    files = plot([row], tmp_path)
    assert [path.suffix for path in files] == [".png", ".svg"]
    assert all(path.stat().st_size > 5000 for path in files)


def playback(tokenizer: Path, seconds: float) -> Playback:
    """One conversation after the other; every turn is answered after 10 ms."""

    async def answered(body: bytes, headers: Mapping[str, str], timeout_s: float) -> Reply:
        asked = time.perf_counter()
        await asyncio.sleep(0.01)
        return Reply(200, asked, asked, time.perf_counter(), bytearray(b"data: [DONE]"), "pull")

    comparison = Comparison(agents(20, 1), Fleet("", replicas=1), "cpu-tiny", tokenizer, seconds=seconds)
    return replace(comparison, time_scale=0.01).playback(comparison.writer(), answered, 1.0, lambda _count: None)


async def test_deeds_are_done_while_turns_are_asked(tokenizer: Path) -> None:
    playing, at = playback(tokenizer, 50.0), []

    async def deed() -> None:
        at.append(playing.elapsed_s())
        await asyncio.sleep(0.07 if len(at) == 1 else 0)

    played = await playing.run_while(deed, 0.05)
    assert at[0] >= 0.05
    assert at[1] >= at[0] + 0.07  # the first took longer than that, so the second was late
    assert len(at) <= 9  # none falls due after half a second, when no further turn is asked
    assert {each.number for each in played} >= {0, 1}
    assert {each.plan for each in played} == {"pull"}


async def test_a_deed_that_fails_ends_the_playback(tokenizer: Path) -> None:
    async def deed() -> None:
        raise BenchError("the engine did not come back")

    playing = playback(tokenizer, 2000.0)
    with pytest.raises(BenchError, match="did not come back"):
        await playing.run_while(deed, 0.05)
    assert playing.elapsed_s() < 5.0


def test_only_what_was_at_a_killed_engine_is_excused_and_what_had_not_begun_is_counted_apart() -> None:
    deeds = [Deed(10.0, "kill", "http://a"), Deed(30.0, "restart", "http://b")]
    lost = replace(turn(9.5, 1.0, error="status 502", e2e_s=1.0), status=502)  # the error's body counts as a first part
    played = [
        turn(5.0, 0.5),
        turn(9.0, 0.5, error="connection lost", e2e_s=1.5),  # it broke half a second after the kill
        lost,
        replace(lost, asked=20.0),  # nothing was killed then
        turn(9.5, 0.0, error="not connected", e2e_s=1.0),  # no engine's doing
        turn(29.0, 0.5, error="connection lost", e2e_s=1.5),  # a restart may break nothing
    ]
    result = judge(ours(["session"])[0], played, deeds, 1.0)
    assert (result.broken_by_kill, result.lost_by_kill) == (1, 1)
    assert result.failed == {"status 502": 1, "not connected": 1, "connection lost": 1}
    assert result.failures == [(21.0, "status 502"), (10.5, "not connected"), (30.5, "connection lost")]
    assert "1 kill, 1 restart" in str(list(churn_table(result).columns[1].cells))


def test_nothing_answered_under_churn_is_no_result() -> None:
    with pytest.raises(BenchError, match="answered nothing"):
        judge(ours(["session"])[0], [turn(1.0, 0.0, error="status 503")], [], 1.0)


def test_an_engine_process_serves_until_it_is_told_to_end(tokenizer: Path) -> None:
    arguments = ["--replicas", "1", "--model-timing", "qwen3-32b-h200", "--tokenizer", str(tokenizer)]
    engine = SimProcess(arguments, run_of_ports(4))
    try:
        engine.start()
        engine.wait_until_ready()
        with urllib.request.urlopen(f"{engine.url}/health", timeout=10) as reply:
            assert reply.status == 200
        assert engine.entry.startswith(f"{engine.url}#kv_events=")
        engine.stop(signal.SIGTERM, 20.0)
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"{engine.url}/health", timeout=10)
    finally:
        engine.stop(signal.SIGKILL, 10.0)


def test_peers_alone_are_asked_for_by_name(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["routing", "--policy", "none", "--output", str(tmp_path)])
    assert refused.exit_code == 1
    assert "leaves nothing to compare" in refused.output
