"""Turns that an engine refuses: what becomes of the prompt's blocks, and of the conversation's reference."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvduplex_router.pd import unread
from kvduplex_router.pd.shape import prefill_body
from kvduplex_router.requests.apis import CHAT, COMPLETIONS, MESSAGES
from kvduplex_router.requests.body import Body

BY_MODEL = {"error": {"message": "1 validation error", "type": "Bad Request", "param": "x", "code": 400}}
BY_SERVING = {"error": {"message": "no such thing", "type": "BadRequestError", "param": None, "code": 400}}
FREEING = {"prompt": [0], "max_tokens": 1, "min_tokens": 2, "stream": False}


def refusing(engine: Any, error: Any = BY_MODEL, status: int = 400) -> list[Any]:
    """Let an engine refuse turns; returns the requests by which blocks are freed, refused as vLLM does."""
    freeing: list[Any] = []

    async def handler(request: Any) -> None:
        if request.target == "/v1/completions" and "min_tokens" in request.json:
            freeing.append(request.json)
            await request.reply(BY_SERVING, 400)
        else:
            await request.reply(error, status)

    engine.handler = handler
    return freeing


# -- blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_blocks_of_a_turn_that_decode_refuses_are_freed(make_cluster: Any, tools: Any, stream: bool) -> None:
    cluster = await make_cluster(prefill=1, decode=1)
    freeing = refusing(cluster.d)
    answer = await cluster.client.chat(stream=stream, max_tokens="x")
    assert (answer.status, answer.json) == (400, BY_MODEL)
    await tools.eventually(lambda: cluster.metric("blocks_freed_total", outcome="told") == 1)
    handed = cluster.d.bodies[0]["kv_transfer_params"]
    assert handed["remote_request_id"] == "prefill0-1"
    assert freeing == [{"model": "m", **FREEING, "kv_transfer_params": handed}]
    assert cluster.d.requests[1].headers["x-request-id"] == answer.headers["x-request-id"]


async def test_the_client_does_not_wait_for_that(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    go_on = asyncio.Event()

    async def handler(request: Any) -> None:
        if request.target == "/v1/completions":
            await go_on.wait()
        await request.reply(BY_MODEL, 400)

    cluster.d.handler = handler
    assert (await cluster.client.chat(max_tokens="x")).status == 400
    assert cluster.idle()
    assert cluster.metric("blocks_freed_total", outcome="told") == 0
    go_on.set()
    await tools.eventually(lambda: cluster.metric("blocks_freed_total", outcome="told") == 1)


@pytest.mark.parametrize("error", [b"plain words", {"detail": "no"}, BY_SERVING, {"type": "error", **BY_MODEL}])
async def test_refusals_of_any_form_free_blocks(make_cluster: Any, tools: Any, error: Any) -> None:
    """Which code of an engine refused cannot be told from what it says."""
    cluster = await make_cluster()
    freeing = refusing(cluster.d, error, 422)
    assert (await cluster.client.chat(model=None)).status == 422
    await tools.eventually(lambda: freeing, "they are freed")
    assert freeing[0]["model"] is None


async def test_a_turn_without_blocks_has_none_to_free(make_cluster: Any) -> None:
    cluster = await make_cluster()
    refusing(cluster.p)
    assert (await cluster.client.chat()).status == 400
    assert cluster.d.requests == []
    refusing(cluster.d)
    assert (await cluster.client.chat(n=2)).status == 400, "served whole"
    assert len(cluster.d.requests) == 1


async def test_an_engine_that_cannot_be_told_is_counted(make_cluster: Any, tools: Any, monkeypatch: Any) -> None:
    cluster = await make_cluster()
    monkeypatch.setattr(unread, "_DEADLINE_S", 0.05)

    async def hang(request: Any) -> None:
        await request.wait_gone()

    async def reset(request: Any) -> None:
        request.reset()

    async def shut_out(request: Any) -> None:
        await request.reply({"error": "Unauthorized"}, 401)

    ways = [hang, reset, shut_out]

    async def handler(request: Any) -> None:
        if request.target == "/v1/completions":
            await ways.pop()(request)
        else:
            await request.reply(BY_MODEL, 400)

    cluster.d.handler = handler
    for failed in (1, 2, 3):
        assert (await cluster.client.chat(max_tokens="x")).status == 400
        await tools.eventually(lambda n=failed: cluster.metric("blocks_freed_total", outcome="failed") == n)


async def test_few_are_told_at_a_time_and_none_after_the_end(make_cluster: Any, tools: Any, monkeypatch: Any) -> None:
    cluster = await make_cluster()
    monkeypatch.setattr(unread, "_AT_ONCE", 1)
    monkeypatch.setattr(unread, "_DEADLINE_S", 60.0)
    gone = asyncio.Event()

    async def handler(request: Any) -> None:
        if request.target == "/v1/completions":
            await request.wait_gone()
            gone.set()
        else:
            await request.reply(BY_MODEL, 400)

    cluster.d.handler = handler
    for _ in range(3):
        assert (await cluster.client.chat(max_tokens="x")).status == 400
    assert cluster.metric("blocks_freed_total", outcome="dropped") == 2
    await tools.eventually(lambda: len(cluster.d.requests) == 4, "the first is under way")
    async with asyncio.timeout(30):
        await cluster.stop_router()
    await asyncio.wait_for(gone.wait(), 10)
    assert cluster.metric("blocks_freed_total", outcome="told") == 0


async def test_leased_engines_keep_nothing_of_that(leases: Any, make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(entries=leases.entries)
    freeing = refusing(cluster.d)
    leases.script(cluster.d)
    assert (await cluster.client.chat(conversation_id="c", max_tokens="x")).status == 400
    await tools.eventually(lambda: freeing, "they are freed")
    assert freeing[0]["kv_transfer_params"]["lease"] == {"retain": False}
    await tools.eventually(lambda: leases.held == 0, "the lease it named is given back")


# -- what the prefill engine refuses -------------------------------------------------------------------------------

ILL_FORMED: list[tuple[Any, dict[str, Any]]] = [
    (CHAT, {"stop": 5}), (COMPLETIONS, {"stop": [1]}), (CHAT, {"stop": {}}), (CHAT, {"bad_words": 5}),
    (MESSAGES, {"stop_sequences": 5}), (CHAT, {"stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"stream_options": {"include_usage": True}, "stream": False}), (CHAT, {"top_logprobs": 3}),
    (CHAT, {"tool_choice": "required"}), (CHAT, {"tool_choice": {"type": "function"}, "tools": None}),
]  # fmt: skip
WELL_FORMED: list[tuple[Any, dict[str, Any]]] = [
    (CHAT, {"stop": "x"}), (CHAT, {"stop": ["x"]}), (CHAT, {"stop": []}), (CHAT, {"stop": None}),
    (CHAT, {"stop": [1, "x"]}), (CHAT, {"bad_words": ["x"]}), (MESSAGES, {"stop_sequences": ["x"]}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True}}), (CHAT, {"stream_options": None}),
    (CHAT, {"logprobs": True, "top_logprobs": 3}), (CHAT, {"top_logprobs": 0}),
    (CHAT, {"tool_choice": None, "tools": []}), (CHAT, {"max_tokens": "5"}),
]  # fmt: skip


def sent(kind: Any, fields: dict[str, Any]) -> Any:
    return json.loads(prefill_body(kind, Body.parse(json.dumps(fields).encode()), b"{}"))


@pytest.mark.parametrize(("kind", "fields"), ILL_FORMED)
def test_what_no_engine_takes_is_left_for_the_prefill_engine_to_refuse(kind: Any, fields: dict[str, Any]) -> None:
    made = sent(kind, fields)
    assert {name: made[name] for name in fields} == fields


@pytest.mark.parametrize(("kind", "fields"), WELL_FORMED)
def test_what_could_shape_the_one_token_is_not(kind: Any, fields: dict[str, Any]) -> None:
    made = sent(kind, fields)
    assert made["stream"] is False
    assert made["max_tokens"] == 1
    assert {"stop", "bad_words", "stop_sequences", "stream_options", "top_logprobs"}.isdisjoint(made)
    assert made.get("tool_choice") in (None, "none")


# -- the reference -------------------------------------------------------------------------------------------------


def handles(cluster: Any) -> list[Any]:
    """What prefill engines were offered of earlier turns, in order; None for nothing."""
    offered = [body["kv_transfer_params"] for body in cluster.p.bodies]
    return [params.get("remote_request_id") or params.get("lease_claim", {}).get("id") for params in offered]


@pytest.fixture(params=["stock", "leased"])
async def cluster(request: Any, leases: Any, make_cluster: Any) -> Any:
    if request.param == "stock":
        return await make_cluster()
    made = await make_cluster(entries=leases.entries)
    leases.script(made.d)
    return made


@pytest.fixture
def turn(tools: Any) -> Any:
    return tools.chat_body("hi", "Hello there", "more")


async def refused_by_prefill(cluster: Any, turn: Any, names: dict[str, str], status: int = 400) -> None:
    good = cluster.p.handler
    refusing(cluster.p, status=status)
    assert (await cluster.client.chat(turn, **names, stop=5)).status == status
    cluster.p.handler = good


@pytest.mark.parametrize("names", [{"conversation_id": "c"}, {}], ids=["by id", "recognised"])
async def test_a_turn_that_prefill_refused_leaves_its_reference(cluster: Any, turn: Any, names: dict[str, str]) -> None:
    await cluster.client.chat(**names)
    await refused_by_prefill(cluster, turn, names)
    await refused_by_prefill(cluster, turn, names)
    answer = await cluster.client.chat(turn, **names)
    assert (answer.status, answer.headers["x-kvduplex-plan"]) == (200, "pull")
    first, *again = handles(cluster)
    assert first is None
    assert len(again) == 3
    assert set(again) == {again[0]} != {None}
    await cluster.client.chat(turn, **names)
    assert handles(cluster)[4] not in again, "it was used"


async def test_a_lease_that_is_put_back_is_still_held_and_then_renewed(
    leases: Any, make_cluster: Any, tools: Any, turn: Any
) -> None:
    cluster = await make_cluster(entries=leases.entries, conversations={"lease_ttl_s": 1.0, "keep_s": 30.0})
    leases.script(cluster.d)
    await cluster.client.chat(conversation_id="c")
    await refused_by_prefill(cluster, turn, {"conversation_id": "c"})
    assert cluster.metric("leases_renewed") == 1
    loop = asyncio.get_running_loop()
    end = loop.time() + 1.5
    while loop.time() < end:
        assert leases.held == 1, "renewed beyond its own second"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("status", [401, 408, 429])
async def test_other_refusals_may_have_come_after_a_read(cluster: Any, turn: Any, status: int) -> None:
    await cluster.client.chat(conversation_id="c")
    await refused_by_prefill(cluster, turn, {"conversation_id": "c"}, status)
    await cluster.client.chat(turn, conversation_id="c")
    assert handles(cluster)[2] is None


async def test_a_turn_that_decode_refused_has_used_its_reference(cluster: Any, turn: Any) -> None:
    await cluster.client.chat(conversation_id="c")
    good = cluster.d.handler
    refusing(cluster.d)
    assert (await cluster.client.chat(turn, conversation_id="c")).status == 400
    cluster.d.handler = good
    assert (await cluster.client.chat(turn, conversation_id="c")).headers["x-kvduplex-plan"] == "recompute"


async def test_an_engine_that_failed_may_have_read(cluster: Any, turn: Any) -> None:
    await cluster.client.chat(conversation_id="c")
    good = cluster.p.handler
    refusing(cluster.p, status=500)
    assert (await cluster.client.chat(turn, conversation_id="c")).status >= 500
    cluster.p.handler = good
    await cluster.client.chat(turn, conversation_id="c")
    used = handles(cluster)[1]
    assert used is not None
    assert handles(cluster).count(used) == 1


async def test_a_turn_that_found_no_place_leaves_its_reference(make_cluster: Any, tools: Any, turn: Any) -> None:
    cluster = await make_cluster(limits={"queued": 0}, entries=lambda _engine: {"max_in_flight": 1})
    await cluster.client.chat(conversation_id="c")
    good, go_on = cluster.d.handler, asyncio.Event()

    async def wait(request: Any) -> None:
        await go_on.wait()
        await good(request)

    cluster.d.handler = wait
    other = asyncio.create_task(cluster.client.chat(conversation_id="other"))
    await tools.eventually(lambda: len(cluster.d.requests) == 2, "the other is under way")
    assert (await cluster.client.chat(turn, conversation_id="c")).status == 429
    go_on.set()
    assert (await other).status == 200
    assert (await cluster.client.chat(turn, conversation_id="c")).headers["x-kvduplex-plan"] == "pull"


async def test_a_newer_reference_stays(cluster: Any, leases: Any, tools: Any, turn: Any) -> None:
    """The turn that took the first one is refused only after another turn has left a newer one."""
    await cluster.client.chat(conversation_id="c")
    good, refuse = cluster.p.handler, asyncio.Event()

    async def late(request: Any) -> None:
        await refuse.wait()
        await request.reply(BY_MODEL, 400)

    cluster.p.handler = late
    refused = asyncio.create_task(cluster.client.chat(turn, conversation_id="c"))
    await tools.eventually(lambda: len(cluster.p.requests) == 2, "it has taken the reference")
    cluster.p.handler = good
    assert (await cluster.client.chat(turn, conversation_id="c")).headers["x-kvduplex-plan"] == "recompute"
    refuse.set()
    assert (await refused).status == 400
    assert cluster.metric("references") == 1
    following = tools.chat_body("hi", "Hello there", "more", "Hello there", "even more")
    assert (await cluster.client.chat(following, conversation_id="c")).headers["x-kvduplex-plan"] == "pull"
    assert len(set(handles(cluster)[1:])) == 3, "the first, none, and the second's"
    await tools.eventually(lambda: leases.held <= 1, "the first's lease is given back")


async def test_no_handle_is_used_twice_however_turns_are_refused_and_race(cluster: Any, turn: Any) -> None:
    good = cluster.p.handler
    used: list[Any] = []

    async def handler(request: Any) -> None:
        params = request.json["kv_transfer_params"]
        await asyncio.sleep(0)
        if request.json.get("stop") == 5:
            await request.reply(BY_MODEL, 400)
            return
        used.append(params.get("remote_request_id") or params.get("lease_claim", {}).get("id"))
        await good(request)

    cluster.p.handler = handler
    for _ in range(10):
        await cluster.client.chat(conversation_id="c")
        await asyncio.gather(
            *(cluster.client.chat(turn, conversation_id="c", **({"stop": 5} if i % 2 else {})) for i in range(8))
        )
    found = [handle for handle in used if handle is not None]
    assert len(found) == len(set(found)) > 0
