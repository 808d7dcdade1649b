"""Leases as the router handles them, against the real lease endpoint of a decode engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest


@pytest.fixture
async def cluster(leases: Any, make_cluster: Any) -> Any:
    made = await make_cluster(
        entries=leases.entries,
        conversations={"lease_ttl_s": 1.0, "keep_s": 1.5},
    )
    leases.script(made.d)
    return made


def lease_of(cluster: Any, index: int = -1) -> Any:
    return cluster.d.bodies[index]["kv_transfer_params"]["lease"]


def claim_of(cluster: Any, index: int = -1) -> Any:
    return cluster.p.bodies[index]["kv_transfer_params"].get("lease_claim")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_router_names_the_lease_and_offers_it_on_the_next_turn(
    cluster: Any, leases: Any, tools: Any, stream: bool
) -> None:
    await cluster.client.chat(conversation_id="c", stream=stream)
    lease = lease_of(cluster)
    assert lease["ttl_s"] == 1.0
    answer = await cluster.client.chat(
        tools.chat_body("entirely", "other", "history"), conversation_id="c", stream=stream
    )
    assert answer.headers["x-kvduplex-plan"] == "pull"
    assert claim_of(cluster) == {"id": lease["id"], "endpoint": leases.server.endpoint}
    assert cluster.p.bodies[1]["kv_transfer_params"]["do_remote_decode"] is True
    assert lease_of(cluster)["id"] != lease["id"]
    assert b"lease" not in answer.body


async def test_a_lease_is_offered_once(cluster: Any, tools: Any) -> None:
    await cluster.client.chat(conversation_id="c")
    bodies = [tools.chat_body("hi", "Hello there", text) for text in ("a", "b", "c")]
    await asyncio.gather(*(cluster.client.chat(body, conversation_id="c") for body in bodies))
    claims = [claim["id"] for index in range(4) if (claim := claim_of(cluster, index)) is not None]
    assert len(claims) == len(set(claims))
    assert claims.count(lease_of(cluster, 0)["id"]) == 1


async def test_a_conversation_without_id_is_recognised(cluster: Any, tools: Any) -> None:
    await cluster.client.chat()
    await cluster.client.chat(tools.chat_body("hi", "whatever the client kept", "more"))
    assert claim_of(cluster)["id"] == lease_of(cluster, 0)["id"]


async def test_what_nobody_could_find_again_is_not_retained(leases: Any, make_cluster: Any) -> None:
    cluster = await make_cluster(
        entries=leases.entries,
        conversations={"recognise": False},
    )
    await cluster.client.chat()
    assert lease_of(cluster) == {"retain": False}
    await cluster.client("/v1/completions", {"model": "m", "prompt": "Once"})
    assert lease_of(cluster) == {"retain": False}


async def test_a_superseded_lease_is_released(cluster: Any, leases: Any, tools: Any) -> None:
    await cluster.client.chat(conversation_id="c")
    first = lease_of(cluster)["id"]
    assert leases.alive(first)
    await cluster.client.chat(conversation_id="c")
    await tools.eventually(lambda: not leases.alive(first), "it is given back")
    assert leases.alive(lease_of(cluster)["id"])


async def test_leases_are_renewed_for_as_long_as_a_next_turn_is_likely(cluster: Any, leases: Any, tools: Any) -> None:
    """The lease lives 1 s from a renewal, and is renewed for 1.5 s."""
    await cluster.client.chat(conversation_id="c")
    end = time.monotonic() + 1.25
    while time.monotonic() < end:
        assert leases.held == 1, "renewed beyond its own second"
        await asyncio.sleep(0.05)
    await tools.eventually(lambda: leases.held == 0, "then left to end")
    assert cluster.metric("leases_renewed") == 0


async def test_a_lease_the_engine_dropped_is_not_offered(cluster: Any, leases: Any, tools: Any) -> None:
    await cluster.client.chat(conversation_id="c")
    leases.table.drop_held()
    await tools.eventually(lambda: cluster.metric("leases_renewed") == 0, "the renewal shows it")
    await cluster.client.chat(conversation_id="c")
    assert claim_of(cluster) is None
    assert cluster.metric("reuse_refused_total", reason="lease_lost") == 1


async def test_an_engine_that_restarted_is_noticed(cluster: Any, leases: Any, tools: Any) -> None:
    await tools.eventually(lambda: leases.asked, "the router asked who answers")
    await cluster.client.chat(conversation_id="c")
    leases.engine_id = "engine-2"
    asked = leases.asked
    await tools.eventually(lambda: leases.asked >= asked + 2, "the router asked again")
    await cluster.client.chat(conversation_id="c")
    assert claim_of(cluster) is None
    assert cluster.metric("reuse_refused_total", reason="engine_restarted") == 1


async def test_an_aborted_stream_loses_no_lease(cluster: Any, tools: Any) -> None:
    async def hang(request: Any) -> None:
        await request.begin_stream()
        await request.event({"choices": [{"index": 0, "delta": {"content": "Hel"}}]})
        await request.wait_gone()

    cluster.d.handler = hang
    reader, writer = await cluster.client.send(
        "/v1/chat/completions", {**tools.chat_body(), "stream": True, "conversation_id": "c"}
    )
    await reader.readuntil(b"Hel")
    writer.close()
    await tools.eventually(cluster.idle, "the turn ended")
    cluster.d.handler = cluster.d.answer
    await cluster.client.chat(tools.chat_body("hi", "Hel", "go on"), conversation_id="c")
    assert claim_of(cluster)["id"] == lease_of(cluster, 0)["id"]


@pytest.mark.parametrize("failure", ["refused", "broken", "in_stream"])
async def test_the_lease_of_a_failed_turn_is_given_back(cluster: Any, leases: Any, tools: Any, failure: str) -> None:
    async def fail(request: Any) -> None:
        if failure == "refused":
            await request.reply({"error": {"message": "no", "type": "x", "code": 400}}, 400)
        elif failure == "broken":
            request.reset()
        else:
            await request.begin_stream()
            await request.event({"error": {"message": "KV load failed", "code": 500}})
            await request.event(b"[DONE]")
            await request.end_stream()

    cluster.d.handler = fail
    leases.script(cluster.d)
    await cluster.client.chat(conversation_id="c", stream=True)
    lease = lease_of(cluster)["id"]
    await tools.eventually(lambda: not leases.alive(lease), "it is given back")
    assert cluster.metric("references") == 0


async def test_an_endpoint_that_does_not_answer_harms_no_turn(leases: Any, make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(
        entries=leases.entries,
    )
    leases.server.close()
    for text in ("a", "b"):
        answer = await cluster.client.chat(tools.chat_body("hi", "Hello there", text), conversation_id="c")
        assert answer.status == 200
    assert claim_of(cluster) is not None


async def test_the_router_gives_all_leases_back_when_it_ends(leases: Any, make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(entries=leases.entries)
    leases.script(cluster.d)
    await cluster.client.chat(conversation_id="c")
    await cluster.client.chat(conversation_id="d")
    assert leases.held == 2
    await cluster.stop_router()
    assert leases.held == 0


async def test_mixed_fleets_use_what_each_engine_speaks(leases: Any, make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(decode=2, entries=lambda e: {"lease": leases.address} if e.name == "decode0" else {})
    for name in ("a", "b"):
        await cluster.client.chat(tools.chat_body(name), conversation_id=name)
    leased, stock = cluster.decode
    assert "lease" in leased.bodies[0]["kv_transfer_params"]
    assert "lease" not in stock.bodies[0]["kv_transfer_params"]
    handed = []
    for name in ("a", "b"):
        await cluster.client.chat(tools.chat_body(name, "Hello there", "more"), conversation_id=name)
        handed.append(cluster.p.bodies[-1]["kv_transfer_params"])
    assert sum("lease_claim" in params for params in handed) == 1
    assert sum("remote_request_id" in params for params in handed) == 1


@pytest.mark.parametrize(("age_s", "plan"), [(85, "pull"), (90, "recompute")])
async def test_a_lease_that_nobody_renewed_until_its_end_is_not_offered(
    leases: Any, make_cluster: Any, tools: Any, age_s: float, plan: str
) -> None:
    """Renewed for 60 s, it lives 30 s more; then its engine would refuse the claim, and nothing would be pulled."""
    passed = [0.0]
    cluster = await make_cluster(
        entries=leases.entries,
        clock=lambda: time.monotonic() + passed[0],
        conversations={"lease_ttl_s": 30, "keep_s": 60},
    )
    leases.script(cluster.d)
    await cluster.client.chat(conversation_id="c")
    passed[0] = age_s
    answer = await cluster.client.chat(tools.chat_body("hi", "Hello there", "more"), conversation_id="c")
    assert answer.headers["x-kvduplex-plan"] == plan
    assert (claim_of(cluster) is None) == (plan == "recompute")
    assert cluster.metric("reuse_refused_total", reason="expired") == (plan == "recompute")
