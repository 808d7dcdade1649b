"""Servers with data-parallel ranks: each rank is an engine, and what it is sent, says and lacks is its own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvduplex_router.config import DnsSource, EngineConfig, build_config
from kvduplex_router.errors import ConfigError
from kvduplex_router.fleet.discovery.dns import DnsNames
from kvduplex_router.fleet.engine import EngineRole
from kvduplex_router.fleet.members import Member, Members
from kvduplex_router.fleet.traits import Load, read_load, read_ranks
from kvduplex_transfer.leases.chain import HashChain

KEY = {"authorization": "Bearer admin-secret"}
ADMIN = {"admin": {"key_env": "ADMIN_KEY"}}
RANK = "x-data-parallel-rank"


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY", "admin-secret")


def exposition(**running: int) -> dict[str, Any]:
    """Metrics of a server whose ranks serve so many requests; `r3` is rank 3."""
    lines = [f'vllm:num_requests_running{{engine="{rank[1:]}",model_name="m"}} {n}.0' for rank, n in running.items()]
    return {"/metrics": ("\n" + "\n".join(lines) + "\n").encode()}


def sent(engine: Any) -> Counter[str]:
    """Requests a server was sent, by the rank they name."""
    return Counter(request.headers.get(RANK, "none") for request in engine.requests)


# -- configuration -----------------------------------------------------------------------------------------------


def test_one_address_stands_for_every_rank_with_the_ports_that_vllm_gives_it() -> None:
    entry = "http://10.0.0.1:8000#lease=10.0.0.1:5900&kv_events=10.0.0.1:5557&kv_replay=[::1]:5657&dp_size=3&dp_start=8"
    engines = build_config(None, engines=[entry, "http://10.0.0.2:8000"]).engines
    assert [(e.name, e.dp_rank, e.dp_start, e.lease, e.kv_events, e.kv_replay) for e in engines] == [
        ("10.0.0.1:8000@0", 0, 8, "10.0.0.1:5908", "10.0.0.1:5565", "[::1]:5665"),
        ("10.0.0.1:8000@1", 1, 8, "10.0.0.1:5909", "10.0.0.1:5566", "[::1]:5666"),
        ("10.0.0.1:8000@2", 2, 8, "10.0.0.1:5910", "10.0.0.1:5567", "[::1]:5667"),
        ("10.0.0.2:8000", None, 0, None, None, None),
    ]


def test_a_rank_is_listed_alone_where_its_addresses_are_its_own() -> None:
    entries = [{"url": "http://e:1", "name": "left", "dp_rank": 0}, "http://e:1#dp_rank=1&kv_events=f:9"]
    left, right = build_config(None, engines=entries).engines
    assert (left.name, left.target) == ("left", "http://e:1#dp_rank=0")
    assert (right.name, right.kv_events) == ("e:1@1", "f:9")


def test_a_name_is_numbered() -> None:
    engines = build_config(None, engines=[{"url": "http://e:1", "name": "moe", "dp_size": 2}]).engines
    assert [engine.name for engine in engines] == ["moe@0", "moe@1"]


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (["http://e:1#dp_size=0"], "engines.0.dp_size: .*greater than or equal to 1, got '0'"),
        (["http://e:1#dp_size=2000"], "engines.0.dp_size: .*less than or equal to 1024, got '2000'"),
        (["http://e:1#dp_rank=x"], "engines.0.dp_rank: .*valid integer.*, got 'x'"),
        (["http://e:1#dp_rank=-1"], "engines.0.dp_rank: .*greater than or equal to 0, got '-1'"),
        (["http://e:1#dp=2"], "fragment 'dp=2' is not understood; allowed are parts of #lease=HOST:PORT.*dp_size="),
        (["http://e:1#dp_size=2&dp_rank=1"], "engines.0: dp_rank 1 and dp_size 2 are both given"),
        (["http://e:1#dp_start=4"], "engines.0: dp_start 4 is given without dp_size or dp_rank"),
        (["http://e:1#dp_size=2&kv_events=e:65535"], "'e:65535' and one more port for each of 2 .* end beyond 65535"),
        (
            ["http://e:1#dp_size=2&kv_events=e:5557&kv_replay=e:5558"],
            "kv_replay 'e:5558' and kv_events meet: 2 data-parallel ranks have ports 5558 to 5559 and 5557 to 5558",
        ),
        (["http://e:1#dp_rank=0", "http://E:1#dp_rank=0"], "url: 'http://e:1#dp_rank=0' is given 2 times"),
        (["http://e:1", "http://e:1#dp_rank=0"], "url: 'http://e:1' is given by data-parallel rank and as one engine"),
        (["http://e:1#dp_size=2", "http://e:1#dp_rank=1"], "url: 'http://e:1#dp_rank=1' is given 2 times"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_ranks_is_said(entries: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_config(None, engines=entries)


# -- what a server says ------------------------------------------------------------------------------------------

METRICS = """
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{model_name="a,engine=\\"1\\"",engine="12"} 2.0
vllm:num_requests_waiting{engine="12"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="12"} 0.75
"""


def test_load_is_that_of_the_rank() -> None:
    assert read_load(METRICS, 1.0, rank=0) == Load(3.0, None, 0.25, 1.0)
    assert read_load(METRICS, 1.0, rank=12) == Load(2.0, 4.0, 0.75, 1.0)
    assert read_load(METRICS, 1.0, rank=1) == Load(None, None, None, 1.0), "not said is not zero"
    assert read_load(METRICS, 1.0) == Load(5.0, 4.0, 0.75, 1.0)
    sglang = '\nsglang:num_running_reqs{dp_rank="1",tp_rank="0"} 7\nsglang:num_running_reqs{dp_rank="0"} 1\n'
    assert read_load(sglang, 1.0, rank=1).running == 7.0


def test_ranks_are_those_that_vllm_counts_for() -> None:
    assert read_ranks(METRICS) == {0, 12}
    assert read_ranks('\nsglang:num_running_reqs{dp_rank="1"} 7\n') == frozenset()
    assert read_ranks("\nvllm:num_requests_running 1\n") == frozenset()


# -- what a server is sent ---------------------------------------------------------------------------------------


async def test_every_request_names_its_rank_and_never_the_clients(make_cluster: Any) -> None:
    router = await make_cluster(
        prefill=0, decode=0, engines=1, entries=lambda _e: {"dp_size": 3}, routing={"policy": "round_robin"}, **ADMIN
    )
    for number in range(6):
        answer = await router.client.chat(
            {"data_parallel_rank": 2, "routed_dp_rank": 2}, {RANK: "7"}, stream=number % 2
        )
        assert answer.status == 200
    assert sent(router.replicas[0]) == {"0": 2, "1": 2, "2": 2}
    assert all({"data_parallel_rank", "routed_dp_rank"}.isdisjoint(body) for body in router.replicas[0].bodies)
    assert len({r.headers["x-request-id"] for r in router.replicas[0].requests}) == 6
    router.replicas[0].requests.clear()
    embedded = await router.client("/v1/embeddings", {"input": "x", "data_parallel_rank": 1}, {RANK: "7"})
    assert embedded.status == 200
    assert set(sent(router.replicas[0])) < {"0", "1", "2"}
    assert all("data_parallel_rank" not in body for body in router.replicas[0].bodies)
    listed = (await router.client("/admin/engines", None, KEY)).json
    assert [(e["name"], e["url"], e["dp_rank"]) for e in listed] == [
        (f"engines0@{rank}", router.replicas[0].url, rank) for rank in range(3)
    ]


async def test_a_server_that_is_one_engine_is_told_no_rank(make_cluster: Any) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=1)
    assert (await router.client.chat({}, {RANK: "1"})).status == 200
    assert sent(router.replicas[0]) == {"none": 1}


async def test_a_server_is_probed_once_for_all_its_ranks(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(
        prefill=0, decode=0, engines=1, entries=lambda _e: {"dp_size": 4}, health={"interval_s": 60, "down_after": 1}
    )
    server, fleet, prober = router.replicas[0], router.router.fleet, router.router.prober
    assert {engine.health.value for engine in fleet.engines} == {"up"}
    assert len(server.probe_keys) == 1
    server.healthy = False
    await prober.probe(*fleet.ranks(fleet.engines[2]))
    assert {engine.health.value for engine in fleet.engines} == {"down"}
    assert len(server.probe_keys) == 2


async def test_the_next_rank_asks_when_the_one_that_asked_is_gone(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=1, entries=lambda _e: {"dp_size": 2}, **ADMIN)
    assert (await router.client("/admin/engines/engines0@0", None, KEY, method="DELETE")).status == 200
    server = router.replicas[0]
    server.healthy = False
    await tools.eventually(lambda: router.router.fleet.find("engines0@1").health == "down", "somebody asks")


async def test_load_of_each_rank_counts_for_that_rank(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(
        prefill=0, decode=0, engines=1, entries=lambda _e: {"dp_size": 2, "dp_start": 4}, **ADMIN
    )
    router.replicas[0].facts = exposition(r4=1, r5=9)
    fleet = router.router.fleet
    await tools.eventually(lambda: all(e.load and e.load.running for e in fleet.engines), "they have been asked")
    assert [engine.load.running for engine in fleet.engines] == [1.0, 9.0]
    assert (await router.client.chat()).status == 200
    assert not sent(router.replicas[0])["4"], "the server counts its own ranks from 0"


async def test_a_rank_that_the_server_lacks_is_left_out_and_named_once(
    make_cluster: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=1, entries=lambda _e: {"dp_size": 3}, **ADMIN)
    fleet, server = router.router.fleet, router.replicas[0]
    server.facts = exposition(r0=0, r1=0)
    await tools.eventually(lambda: not fleet.find("engines0@2").usable, "it is left out")
    for _ in range(8):
        assert (await router.client.chat()).status == 200
    assert set(sent(server)) == {"0", "1"}
    told = "replica engine engines0@2 is left out: its server has no data-parallel rank 2, only 0 to 1"
    assert len([r for r in caplog.records if told in r.message]) == 1
    listed = {e["name"]: e for e in (await router.client("/admin/engines", None, KEY)).json}
    assert listed["engines0@2"]["shut_because"] == {"no_rank": "its server has no data-parallel rank 2, only 0 to 1"}
    server.facts = exposition(r8=0)
    await tools.eventually(fleet.missing, "nothing is left")
    ready = await router.client("/ready")
    assert ready.status == 503
    assert "engines0@0 is its server has no data-parallel rank 0, only 8" in ready.body.decode()
    server.facts = exposition(r0=0, r1=0, r2=0)
    await tools.eventually(lambda: all(engine.usable for engine in fleet.engines), "the server has grown")


async def test_a_server_whose_ranks_are_not_listed_is_named_once_with_the_remedy(
    make_cluster: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvduplex.router.fleet")
    router = await make_cluster(prefill=0, decode=0, engines=1)
    server = router.replicas[0]
    server.facts = exposition(r4=0, r5=2)
    await tools.eventually(lambda: "is listed as one engine" in caplog.text, "it is told")
    probes = len(server.probe_keys)
    await tools.eventually(lambda: len(server.probe_keys) > probes + 2, "some probes more")
    told = [r.message for r in caplog.records if "is listed as one engine" in r.message]
    assert len(told) == 1
    assert f"List it as {server.url}#dp_size=2&dp_start=4" in told[0]
    assert router.router.fleet.engines[0].load.running == 2.0
    assert (await router.client.chat()).status == 200


# -- failures ----------------------------------------------------------------------------------------------------


async def test_ranks_of_a_server_that_cannot_be_reached_are_not_tried_one_by_one(make_cluster: Any) -> None:
    """One retry is allowed, and it must not be spent on the same dead socket."""
    router = await make_cluster(
        prefill=2, decode=1, entries=lambda e: {"dp_size": 4} if e.name == "prefill0" else {},
        health={"interval_s": 60}, breaker={"failures": 1_000},
    )  # fmt: skip
    await router.prefill[0].stop()
    for number in range(12):
        answer = await router.client.chat({"messages": [{"role": "user", "content": f"{number} hi"}]})
        assert answer.status == 200, answer.body
    assert len(router.prefill[1].requests) == 12


async def test_a_rank_that_fails_alone_leaves_the_others_to_be_tried(make_cluster: Any) -> None:
    router = await make_cluster(
        prefill=1, decode=1, entries=lambda e: {"dp_size": 2} if e.name == "prefill0" else {},
        breaker={"failures": 1_000},
    )  # fmt: skip
    answer = router.p.handler

    async def rank_0_is_broken(request: Any) -> None:
        await (request.reply({}, 500) if request.headers[RANK] == "0" else answer(request))

    router.p.handler = rank_0_is_broken
    for number in range(6):
        got = await router.client.chat({"messages": [{"role": "user", "content": f"{number} hi"}]})
        assert got.status == 200, got.body
    assert sent(router.p)["0"] > 0


# -- prefill and decode ------------------------------------------------------------------------------------------


async def test_a_conversation_comes_back_to_the_rank_that_holds_its_lease(
    make_cluster: Any, leases: Any, tools: Any
) -> None:
    """The decode server has two ranks, and each a lease endpoint of its own."""
    endpoints = {"0": leases, "1": type(leases)()}
    first = await make_cluster()
    server = first.d
    answer = server.handler

    async def hold(request: Any) -> None:
        lease = request.json["kv_transfer_params"]["lease"]
        table = endpoints[request.headers[RANK]].table
        table.hold(lease["id"], HashChain.of([b"h" * 32]), [1], lease["ttl_s"])
        await answer(request)

    server.handler = hold
    try:
        entries = [f"{server.url}#dp_rank={rank}&lease={each.address}" for rank, each in endpoints.items()]
        router = await first.another(decode=entries)
        for _ in range(3):
            for name in "abcdef":
                assert (await router.client.chat(conversation_id=name)).status == 200
        assert set(sent(server)) == {"0", "1"}
        turns: dict[str, str] = {}
        claims = {
            claim["id"]: claim["endpoint"]
            for body in router.p.bodies
            if (claim := body["kv_transfer_params"].get("lease_claim")) is not None
        }
        for request in server.requests:
            turns[request.json["kv_transfer_params"]["lease"]["id"]] = request.headers[RANK]
        assert len(claims) == 12, "every turn but the first six"
        for lease, endpoint in claims.items():
            assert endpoint == endpoints[turns[lease]].server.endpoint
    finally:
        endpoints["1"].server.close()


# -- sources -----------------------------------------------------------------------------------------------------


def replica(url: str, **more: Any) -> Member:
    return Member.of(EngineRole.REPLICA, EngineConfig(url=url, **more))


def test_ranks_of_one_server_are_engines_and_the_server_is_none_beside_them(present: Any) -> None:
    members = Members(present, check=lambda _member: None)
    members.update("file", [replica("http://e:1", dp_rank=0), replica("http://e:1", dp_rank=1)])
    members.update("dns", [replica("http://e:1", dp_rank=1), replica("http://e:1"), replica("http://f:1")])
    assert present.names == {"e:1@0", "e:1@1", "f:1"}
    told = "its server is listed by data-parallel rank and as one engine; keep one of both (dp_size, or nothing)"
    assert [(each.source, each.url, each.reason) for each in members.refused] == [("dns", "http://e:1", told)]
    assert members.admit(replica("http://f:1", dp_rank=0)) == told
    assert members.admit(replica("http://e:1", dp_rank=2)) is None
    assert members.dismiss("e:1@0")
    assert present.names == {"e:1@1", "e:1@2", "f:1"}
    members.update("file", [])
    members.update("dns", [replica("http://e:1", dp_rank=0, name="again")])
    assert present.names == {"e:1@2", "again"}


async def test_an_operator_adds_ranks_one_at_a_time(make_cluster: Any) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=1, entries=lambda _e: {"dp_rank": 0}, **ADMIN)
    body = {"url": router.replicas[0].url, "role": "replica"}
    refused = await router.client("/admin/engines", {**body, "dp_size": 2}, KEY)
    assert refused.status == 400
    assert "dp_size 2: engines are added one at a time; give dp_rank" in refused.body.decode()
    assert (await router.client("/admin/engines", body, KEY)).status == 409
    added = await router.client("/admin/engines", {**body, "dp_rank": 1}, KEY)
    assert (added.status, added.json["dp_rank"]) == (201, 1)
    for number in range(4):
        assert (await router.client.chat({"messages": [{"role": "user", "content": f"{number}"}]})).status == 200
    assert set(sent(router.replicas[0])) <= {"0", "1"}


async def test_every_address_of_a_name_may_have_ranks(tmp_path: Path) -> None:
    async def resolve(_name: str) -> list[str]:
        await asyncio.sleep(0)
        return ["10.0.0.1", "::1"]

    config = DnsSource.model_validate(
        {"name": "moe.internal", "port": 8000, "role": "replica", "dp_size": 2, "kv_events_port": 5557}
    )
    listed = await DnsNames(config, interval_s=1, missing_after=1, resolve=resolve).look()
    assert [(each.config.name, each.config.kv_events) for each in listed] == [
        ("10.0.0.1:8000@0", "10.0.0.1:5557"), ("10.0.0.1:8000@1", "10.0.0.1:5558"),
        ("[::1]:8000@0", "[::1]:5557"), ("[::1]:8000@1", "[::1]:5558"),
    ]  # fmt: skip
    file = tmp_path / "router.yaml"
    source = {"name": "n", "port": 1, "role": "replica", "dp_size": 2, "kv_events_port": 7, "kv_replay_port": 8}
    file.write_text(json.dumps({"discovery": {"dns": [source]}}))
    with pytest.raises(ConfigError, match=r"router.yaml:1: discovery.dns.0: kv_replay 'host:8' and kv_events meet"):
        build_config(file)
