"""Real engines with data-parallel ranks: requests reach the rank they name, and the router knows each rank's cache."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.events_rig import ENVIRONMENT, Router, events_engine, process, words
from tests.e2e.leased_pair import started, tiny_model

from kvduplex_bench.cluster import free_ports
from kvduplex_bench.scrape import scrape

pytestmark = pytest.mark.engine

RANKS = ("--data-parallel-size", "2")


def port_pairs(count: int) -> list[int]:
    """Ports whose next one is free too, for the second rank; below those that the system itself hands out meanwhile."""
    found: list[int] = []
    for port in range(20_000 + 4 * (os.getpid() % 2_000), 32_000, 4):
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} pairs of ports are free")


def served_by_rank(url: str) -> list[float]:
    """Requests that each rank has ended."""
    reading = scrape(url)
    return [reading.total("vllm:request_success_total", engine=rank) for rank in ("0", "1")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, str, str]]:
    """A server of two ranks that publish KV events, and a router: the router, the server's URL, the router's log."""
    folder = tmp_path_factory.mktemp("ranks")
    events, replay = port_pairs(2)
    http, listen = free_ports(2)
    model = tiny_model()
    engine = events_engine(model, http, events=events, replay=replay, block=32, blocks=160, more=RANKS)
    server, url = f"http://127.0.0.1:{http}", f"http://127.0.0.1:{listen}"
    entry = f"{server}#dp_size=3&kv_events=127.0.0.1:{events}&kv_replay=127.0.0.1:{replay}"
    front = [
        sys.executable, "-m", "kvduplex_router", "--listen", f"127.0.0.1:{listen}", "--policy", "kv_events",
        "--tokenizer", str(model), "--engine", entry,
    ]  # fmt: skip
    with (
        process(engine, ENVIRONMENT, folder / "engine.log", f"{server}/health"),
        process(front, {}, folder / "router.log", f"{url}/ready"),
    ):
        made = Router(url)
        deadline = time.monotonic() + 30
        while scrape(url).total("kvduplex_router_events_trusted") < 2:
            assert time.monotonic() < deadline, "both ranks are followed"
            time.sleep(0.1)
        yield made, server, str(folder / "router.log")


def test_predictions_hold_for_each_rank_by_itself(served: tuple[Router, str, str]) -> None:
    """Conversations over both ranks, and not a token is predicted wrongly."""
    router, server, _ = served
    histories: list[list[dict[str, Any]]] = []
    seen = 0

    def ask(history: list[dict[str, Any]], turn: int) -> int:
        answer, cached, counts = router.chat(history)
        assert counts["predicted_tokens_off"] == 0, (turn, cached, counts)
        assert counts["prompts_miscounted"] == 0
        history += [{"role": "assistant", "content": answer}, {"role": "user", "content": words(turn, 30)}]
        return cached

    while len(histories) < 4 or min(served_by_rank(server)) < 1:  # which rank a beginning is hashed to is chance
        assert len(histories) < 24, "new conversations go to both ranks"
        histories.append([{"role": "user", "content": words(10 + len(histories), 260)}])
        seen += ask(histories[-1], 0)
    for turn in range(1, 4):
        for history in histories:
            seen += ask(history, turn)
    assert seen > 1_000, "there was something to predict"
    done = served_by_rank(server)
    assert min(done) >= 4, f"both ranks served: {done}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_the_server_does_what_the_header_says(served: tuple[Router, str, str], path: str) -> None:
    """What the router rests on, on every path that the documentation names."""
    _, server, _ = served

    def ask(rank: int) -> int:
        before = served_by_rank(server)
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 2}
        body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
        headers = {"content-type": "application/json", "x-data-parallel-rank": str(rank)}
        request = urllib.request.Request(server + path, json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=60).close()
        deadline = time.monotonic() + 10
        while (after := served_by_rank(server)) == before:
            assert time.monotonic() < deadline, "no rank counted the request"
            time.sleep(0.05)
        return next(rank for rank in (0, 1) if after[rank] > before[rank])

    assert [ask(rank) for rank in (1, 1, 0, 1, 0)] == [1, 1, 0, 1, 0]
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(2)


def test_a_rank_that_is_not_there_is_left_out(served: tuple[Router, str, str]) -> None:
    """The entry says three; without this every third request would be refused for the router's fault."""
    router, _, log = served
    with open(log) as lines:  # noqa: PTH123 - a child's output
        assert "@2 is left out: its server has no data-parallel rank 2, only 0 to 1" in lines.read()
    for number in range(6):
        router.chat([{"role": "user", "content": words(500 + number, 220)}])


def test_a_conversation_is_pulled_from_the_rank_that_leased_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Decode ranks have a lease endpoint each, and the router asks the right one."""
    folder = tmp_path_factory.mktemp("leased-ranks")
    lease, side = port_pairs(2)
    (listen,) = free_ports(1)
    model = tiny_model()
    decode = {"extra_argv": RANKS, "lease_port": lease, "side_channel_port": side}
    with started(model, folder, prefill={"prefix_caching": False}, decode=decode) as pair:
        entry = f"{pair.decode.plan.url}#dp_size=2&lease={pair.lease_endpoint.removeprefix('tcp://')}"
        front = [
            sys.executable, "-m", "kvduplex_router", "--listen", f"127.0.0.1:{listen}", "--prefill",
            pair.prefill.plan.url, "--decode", entry, "--reuse", "leased",
        ]  # fmt: skip
        url = f"http://127.0.0.1:{listen}"
        with process(front, {}, folder / "router.log", f"{url}/ready"):
            router = Router(url, model="pair")
            histories = {name: [{"role": "user", "content": words(i, 200)}] for i, name in enumerate("abcd")}
            for turn in range(3):
                for name, history in histories.items():
                    answer, cached, _ = router.chat(history, conversation_id=name)
                    assert (cached > 150) == (turn > 0), (turn, name, cached)
                    history += [{"role": "assistant", "content": answer}, {"role": "user", "content": words(turn, 20)}]
            done = served_by_rank(pair.decode.plan.url)
            assert min(done) >= 3, f"both ranks answered: {done}"
            assert scrape(url).total("kvduplex_router_reuse_refused_total", reason="lease_lost") == 0
