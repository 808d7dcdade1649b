"""Restarts of routers: what the load balancer may send again, what counts as a fault, and one short run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvduplex_bench.app import app
from kvduplex_bench.errors import BenchError
from kvduplex_bench.routing.arms import ours
from kvduplex_bench.routing.balancer import Balancer, Moved
from kvduplex_bench.routing.fleet import Handles, handles_used, sim_running
from kvduplex_bench.routing.play import Played
from kvduplex_bench.routing.ports import run_of_ports
from kvduplex_bench.routing.report import rolling_line, rolling_table
from kvduplex_bench.routing.rolling import Restart, RollingResult, judge, rolling
from kvduplex_bench.routing.run import Comparison, Fleet
from kvduplex_bench.traces.generate import agents
from kvduplex_transfer.leases.params import ClaimOffer

OK = b"HTTP/1.1 200 OK\r\nx-kvduplex-plan: pull\r\ncontent-length: 2\r\n\r\nok"
ARM = ours(["kv_events"])[0]


class Scripted:
    """A router that plays a script: an answer for each request, or None for none. At its end it hangs up."""

    def __init__(self, *script: bytes | None) -> None:
        self._script = list(script)
        self._open: list[asyncio.StreamWriter] = []
        self.requests = 0
        self.connections = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.append(writer)
        while await reader.read(65536):
            self.requests += 1
            answer = self._script.pop(0)
            if answer is not None:
                writer.write(answer)
            if answer is None or not self._script:
                break
        writer.close()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Scripted]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in self._open:
                writer.close()


async def test_connections_are_kept_and_routers_take_turns() -> None:
    async with Scripted(OK, OK).up() as one, Scripted(OK, OK).up() as other:
        balancer = Balancer([one.port, other.port])
        replies = [await balancer.ask(b"{}", {}, 10.0) for _ in range(4)]
        balancer.close()
    assert [(reply.good, reply.plan) for reply in replies] == [(True, "pull")] * 4
    assert (one.requests, other.requests) == (2, 2)
    assert (one.connections, other.connections) == (1, 1)
    assert balancer.moved == Moved()


async def test_a_router_that_refuses_gets_nothing_until_it_serves_again() -> None:
    gone = Scripted(OK)
    async with gone.up():
        pass
    async with Scripted(*[OK] * 4).up() as there:
        balancer = Balancer([there.port, gone.port])
        for _ in range(3):
            assert (await balancer.ask(b"{}", {}, 10.0)).good
        assert balancer.moved == Moved(refused=1)
        async with gone.up():
            balancer.serve(gone.port)
            balancer.serve(gone.port)
            for _ in range(2):
                assert (await balancer.ask(b"{}", {}, 10.0)).good
        balancer.close()
    assert (there.requests, gone.requests) == (4, 1)


async def test_a_kept_connection_that_closes_without_an_answer_is_tried_elsewhere() -> None:
    async with Scripted(OK, None).up() as one, Scripted(OK, OK, OK).up() as other:
        balancer = Balancer([one.port, other.port])
        replies = [await balancer.ask(b"{}", {}, 10.0) for _ in range(4)]
        balancer.close()
    assert all(reply.good for reply in replies)
    assert (one.requests, other.requests) == (2, 3)
    assert balancer.moved == Moved(closed=1)


@pytest.mark.parametrize(
    "script",
    [[None], [OK, OK[:-1]], [OK, b"H"]],
    ids=["a fresh connection", "a kept one in the middle of an answer", "a kept one after a byte"],
)
async def test_what_a_router_may_have_begun_is_not_sent_again(script: list[bytes | None]) -> None:
    """A turn that a router has read must not reach another one, for its handle is taken."""
    async with Scripted(*script).up() as router, Scripted(OK, OK).up() as spare:
        balancer = Balancer([spare.port, router.port])
        while (reply := await balancer.ask(b"{}", {}, 10.0)).good:
            pass
        balancer.close()
    assert "connection lost" in reply.error
    assert reply.asked <= reply.ended
    assert balancer.moved == Moved()
    assert (router.requests, spare.requests) == (len(script), len(script) - 1)


async def test_no_router_left_is_a_failure_that_says_when() -> None:
    gone = Scripted()
    async with gone.up():
        pass
    reply = await Balancer([gone.port]).ask(b"{}", {}, 10.0)
    assert reply.error == "not connected: no router takes connections"
    assert 0 < reply.asked <= reply.ended


def turn(number: int, plan: str, error: str = "") -> Played:
    return Played("agents", 5.0, 0.5, 1.5, 100, 50, 10, 0 if error else 200, error, plan, number)


RESTARTS = [Restart(20.0, 1, 4.0, 5.0, 0), Restart(40.0, 2, 6.0, 7.0, 0)]
GOOD = [turn(0, "recompute"), turn(1, "pull"), turn(2, "pull"), turn(3, "recompute")]


USED = Handles(2)


def judged(played: list[Played] = GOOD, restarts: list[Restart] = RESTARTS, handles: Handles = USED) -> RollingResult:
    return judge(ARM, played, restarts, Moved(2, 1), handles, 2.0)


def test_a_run_without_a_fault() -> None:
    result = judged()
    assert result.faults() == []
    assert (result.answered, result.later, result.pulled) == (4, 3, 2)
    cells = list(rolling_table(result).columns[1].cells)
    assert "5.0, 6.0" in cells
    assert "50.0%" in cells
    assert "66.7%" in cells
    assert "2, 0" in cells


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (lambda: judged([*GOOD, turn(1, "", "status 502")]), "1 requests failed"),
        (lambda: judged(handles=Handles(2, 1)), "1 handles were used more than once"),
        (lambda: judged(restarts=[*RESTARTS, Restart(60.0, 1, 330.0, 331.0, -9)]), "1 routers did not end"),
    ],
)
def test_each_fault_is_one(result: Callable[[], RollingResult], fault: str) -> None:
    assert len(found := result().faults()) == 1
    assert found[0].startswith(fault)


def test_failures_say_when_they_ended() -> None:
    assert judged([*GOOD, turn(1, "", "status 502")]).failures == [(13.0, "status 502")]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: judged([turn(0, "", "status 503")]), "answered nothing"),
        (lambda: judged(handles=Handles(0)), "used no handle"),
        (lambda: judged(restarts=RESTARTS[:1]), "not every router"),
    ],
)
def test_a_run_that_shows_nothing_is_no_result(wrong: Callable[[], RollingResult], why: str) -> None:
    with pytest.raises(BenchError, match=why):
        wrong()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--rolling", "--churn"], "leave one out"),
        (["--rolling", "--fleet", "8 replicas"], "take 4P4D"),
        (["--rolling", "--fleet", "4P4D", "--fleet", "2P2D"], "take one fleet"),
        (["--churn", "--fleet", "4P4D"], "its engines are replicas"),
        (["--fleet", "0P4D"], "expected engines as in"),
        (["--rolling", "--trace", "batch"], "no arrival times"),
        (["--rolling", "--seconds", "59"], "take --seconds 60 or more"),
        (["--rolling", "--seconds", "60"], "apt-get install redis-server"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: list[str], why: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no state server there
    command = ["routing", "--tokenizer", str(tokenizer), "--output", str(tmp_path), *options]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert why in " ".join(refused.output.split())


def test_a_handle_given_to_two_engines_is_used_twice(tokenizer: Path) -> None:
    arguments = ["--prefill", "2", "--decode", "1", "--model-timing", "qwen3-32b-h200", "--tokenizer", str(tokenizer)]
    with sim_running([*arguments, "--port", str(run_of_ports(12)), "--time-scale", "0.01"]) as engines:
        lease = next(str(each["lease"]) for each in engines if each["role"] == "decode")
        one, other = (str(each["url"]) for each in engines if each["role"] == "prefill")
        for url, name in ((one, "first"), (one, "second"), (other, "first")):
            body = {
                "messages": [{"role": "user", "content": "tell me " * 200}], "max_tokens": 1,
                "kv_transfer_params": ClaimOffer(name, f"tcp://{lease}").to_params(),
            }  # fmt: skip
            data = json.dumps(body).encode()
            with urllib.request.urlopen(f"{url}/v1/chat/completions", data, timeout=10) as answer:
                assert answer.status == 200
        assert handles_used(engines) == Handles(2, 1, {"unknown": 3})
    with pytest.raises(BenchError, match="did not say which leases"):
        handles_used(engines)


def test_two_routers_are_restarted_under_load(tokenizer: Path) -> None:
    if shutil.which("valkey-server") is None and shutil.which("redis-server") is None:
        missing = "no valkey-server and no redis-server here; install one (Debian: apt-get install redis-server)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    trace = agents(8, 1)
    short = [replace(each, turns=each.turns[:8]) for each in trace.conversations]
    comparison = Comparison(  # so few conversations fill no fleet: its full rate is the highest that is tried, 1,462/s
        replace(trace, conversations=tuple(short)), Fleet("1P1D", prefill=1, decode=1), "qwen3-32b-h200", tokenizer,
        load=0.0002, seconds=100.0, time_scale=0.1,
    )  # fmt: skip
    result = rolling(comparison, ARM, every_s=1.0)
    assert result.faults() == []
    assert len(result.restarts) >= 2
    assert result.handles.used >= result.pulled > 0
    row = json.loads(rolling_line(result, comparison, {"date": "today"}))
    assert (row["bench"], row["failed"], row["handles"]["twice"]) == ("rolling", {}, 0)
