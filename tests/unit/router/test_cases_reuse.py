"""Rows R1-R7: which turn may use the last turn's KV, with stock engines."""

from __future__ import annotations

from typing import Any

import pytest

FIRST = "hi"
ANSWER = "Hello there"


def turn(tools: Any, *texts: str, **changes: Any) -> dict[str, Any]:
    return {**tools.chat_body(*texts), **changes}


async def first_turn(cluster: Any, **fields: Any) -> None:
    assert (await cluster.client.chat(conversation_id="c", **fields)).status == 200


def handed(cluster: Any) -> bool:
    return "remote_request_id" in cluster.p.bodies[-1]["kv_transfer_params"]


def with_message(body: dict[str, Any], index: int, **changes: Any) -> dict[str, Any]:
    messages = [dict(message) for message in body["messages"]]
    messages[index].update(changes)
    return {**body, "messages": messages}


CHANGES: dict[str, Any] = {
    "answer_edited": lambda b: with_message(b, 1, content=ANSWER + "!"),
    "earlier_message_edited": lambda b: with_message(b, 0, content="Hi"),
    "system_prompt_added": lambda b: {**b, "messages": [{"role": "system", "content": "x"}, *b["messages"]]},
    "regenerated": lambda b: {**b, "messages": b["messages"][:1]},
    "compacted": lambda b: {**b, "messages": b["messages"][1:]},
    "answer_in_parts": lambda b: with_message(b, 1, content=[{"type": "text", "text": ANSWER}]),
    "reasoning_added": lambda b: with_message(b, 1, reasoning="hm"),
    "name_added": lambda b: with_message(b, 1, name="bot"),
    "tools": lambda b: {**b, "tools": [{"type": "function", "function": {"name": "f"}}]},
    "template_arguments": lambda b: {**b, "chat_template_kwargs": {"enable_thinking": True}},
    "cache_salt": lambda b: {**b, "cache_salt": "s"},
    "model": lambda b: {**b, "model": "lora"},
    "documents": lambda b: {**b, "documents": [{"text": "x"}]},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_r1_exact_append_reuses(make_cluster: Any, tools: Any, stream: bool) -> None:
    cluster = await make_cluster()
    await first_turn(cluster, stream=stream)
    answer = await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c", stream=stream)
    assert answer.headers["x-kvduplex-plan"] == "pull"
    assert handed(cluster)


@pytest.mark.parametrize("change", list(CHANGES))
async def test_r1_anything_else_does_not(make_cluster: Any, tools: Any, change: str) -> None:
    cluster = await make_cluster()
    await first_turn(cluster)
    body = CHANGES[change](turn(tools, FIRST, ANSWER, "more"))
    answer = await cluster.client.chat(body, conversation_id="c")
    assert answer.headers["x-kvduplex-plan"] == "recompute"
    assert not handed(cluster)
    refused = sum(cluster.metric("reuse_refused_total", reason=r) for r in ("history_changed", "answer_changed"))
    assert refused == (0 if change == "model" else 1)  # another model is another conversation


async def test_a_read_that_fails_is_computed_by_the_same_engine_instead(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    await first_turn(cluster)
    serve = cluster.p.handler

    async def cannot_read(request: Any) -> None:
        if handed(cluster):
            await request.reply({"error": {"message": "KV load failure", "code": 500}}, 500)
        else:
            await serve(request)

    cluster.p.handler = cannot_read
    answer = await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c")
    assert (answer.status, answer.headers["x-kvduplex-plan"]) == (200, "recompute")
    assert [("remote_request_id" in body["kv_transfer_params"]) for body in cluster.p.bodies] == [False, True, False]


async def test_an_engine_that_fails_without_a_reference_is_not_asked_twice(make_cluster: Any) -> None:
    cluster = await make_cluster()
    cluster.p.handler = lambda request: request.reply({"error": {"message": "out of order", "code": 500}}, 500)
    assert (await cluster.client.chat(conversation_id="c")).status >= 500
    assert len(cluster.p.bodies) == 1


async def test_r1_openai_clients_send_null_fields_back(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    await first_turn(cluster)
    body = with_message(turn(tools, FIRST, ANSWER, "more"), 1, refusal=None, tool_calls=[], annotations=[], audio=None)
    assert (await cluster.client.chat(body, conversation_id="c")).headers["x-kvduplex-plan"] == "pull"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("same", [True, False])
async def test_r1_tool_arguments_must_be_the_generated_bytes(
    make_cluster: Any, tools: Any, stream: bool, same: bool
) -> None:
    cluster = await make_cluster()
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}

    async def answer(request: Any) -> None:
        params = cluster.d.params(do_remote_prefill=False)
        if not request.json.get("stream"):
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            await request.reply({"choices": [choice], "kv_transfer_params": params})
            return
        await request.begin_stream()
        deltas: list[dict[str, Any]] = [
            {"index": 0, "id": "t1", "type": "function", "function": {"name": "f", "arguments": ""}},
            {"index": 0, "function": {"arguments": '{"a"'}},
            {"index": 0, "function": {"arguments": ":1}"}},
        ]
        for delta in deltas:
            await request.event({"choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]})
        await request.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        await request.event({"choices": [], "kv_transfer_params": params})
        await request.event(b"[DONE]")
        await request.end_stream()

    cluster.d.handler = answer
    await first_turn(cluster, stream=stream)
    arguments = '{"a":1}' if same else '{"a": 1}'
    sent = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "function": {"name": "f", "arguments": arguments}}],
    }
    body = turn(tools, FIRST)
    body["messages"] += [sent, {"role": "tool", "tool_call_id": "t1", "content": "2"}]
    await cluster.client.chat(body, conversation_id="c", stream=stream)
    assert handed(cluster) is same


@pytest.mark.parametrize("stream", [False, True])
async def test_r1_an_answer_with_reasoning_is_never_referred_to(make_cluster: Any, tools: Any, stream: bool) -> None:
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        params = cluster.d.params(do_remote_prefill=False)
        part = {"role": "assistant", "content": ANSWER, "reasoning": "because"}
        if stream:
            await request.begin_stream()
            await request.event({"choices": [{"index": 0, "delta": part, "finish_reason": "stop"}]})
            await request.event({"choices": [], "kv_transfer_params": params})
            await request.event(b"[DONE]")
            await request.end_stream()
        else:
            choice = {"index": 0, "message": part, "finish_reason": "stop"}
            await request.reply({"choices": [choice], "kv_transfer_params": params})

    cluster.d.handler = answer
    await first_turn(cluster, stream=stream)
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c", stream=stream)
    assert not handed(cluster)


async def test_r1_branches_of_one_turn(make_cluster: Any, tools: Any) -> None:
    """A regenerated answer replaces the first; only the branch that goes on from it reuses."""
    cluster = await make_cluster()
    await first_turn(cluster)
    cluster.d.answer_text = "Other words"
    await cluster.client.chat(turn(tools, FIRST), conversation_id="c")
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c")
    assert not handed(cluster)
    await cluster.client.chat(turn(tools, FIRST), conversation_id="c2")
    await cluster.client.chat(turn(tools, FIRST, "Other words", "more"), conversation_id="c2")
    assert handed(cluster)


@pytest.mark.parametrize(("age", "reused"), [(99.9, True), (100.0, False), (101.0, False)])
async def test_r3_nothing_is_sent_from_the_end_of_its_time(
    make_cluster: Any, tools: Any, age: float, reused: bool
) -> None:
    now = [1000.0]
    settings = {"reference_ttl_s": 100, "decoder_kv_blocks_ttl_s": 120}
    cluster = await make_cluster(clock=lambda: now[0], conversations=settings)
    await first_turn(cluster)
    now[0] += age
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c")
    assert handed(cluster) is reused
    assert cluster.metric("reuse_refused_total", reason="expired") == float(not reused)


async def test_r3_foreign_clocks_are_not_read(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    params = cluster.d.params
    cluster.d.params = lambda **changes: {**params(**changes), "remote_blocks_expiry_time": -5.0}
    await first_turn(cluster)
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c")
    assert handed(cluster)
    assert cluster.p.bodies[-1]["kv_transfer_params"]["remote_blocks_expiry_time"] == -5.0


@pytest.mark.parametrize("place", ["last_data_chunk", "own_chunk", "three_writes"])
async def test_r4_params_in_any_chunk(make_cluster: Any, tools: Any, place: str) -> None:
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        params = cluster.d.params(do_remote_prefill=False, unknown_key={"kept": [1]})
        last: dict[str, Any] = {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        own: dict[str, Any] = {"id": "x", "choices": [], "kv_transfer_params": params}
        if place == "last_data_chunk":
            last["kv_transfer_params"] = params
        await request.begin_stream()
        await request.event({"choices": [{"index": 0, "delta": {"content": ANSWER}}]})
        await request.event(last)
        if place == "own_chunk":
            await request.event(own)
        elif place == "three_writes":
            data = b"data: " + tools.dumps(own) + b"\n\n"
            for piece in (data[:20], data[20:21], data[21:]):
                await request.chunk(piece)
        await request.event(b"[DONE]")
        await request.end_stream()

    cluster.d.handler = answer
    first = await cluster.client.chat(conversation_id="c", stream=True)
    assert first.text == ANSWER
    assert b"kv_transfer_params" not in first.body
    assert '"finish_reason":"stop"' in first.body.decode().replace(" ", "")
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c", stream=True)
    assert handed(cluster)
    assert cluster.p.bodies[-1]["kv_transfer_params"]["unknown_key"] == {"kept": [1]}


@pytest.mark.parametrize("bad", [["a"], {"a": 1}, "x" * 10_000, "", 7, "a\nb", True])
async def test_r4_bad_ids_are_refused(make_cluster: Any, bad: Any) -> None:
    cluster = await make_cluster()
    answer = await cluster.client.chat(conversation_id=bad)
    assert answer.status == 400
    assert answer.json["error"]["param"] == "conversation_id"
    assert cluster.p.requests == []


@pytest.mark.parametrize("good", ["😀", "c 1", "Ünïcode", "x" * 256])
async def test_r4_good_ids(make_cluster: Any, tools: Any, good: str) -> None:
    cluster = await make_cluster()
    await cluster.client.chat(conversation_id=good)
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), {"X-Conversation-ID": good})
    assert handed(cluster)


async def test_r4_a_null_id_is_none(make_cluster: Any) -> None:
    cluster = await make_cluster()
    assert (await cluster.client.chat(conversation_id=None)).status == 200
    assert "conversation_id" not in cluster.d.bodies[0]


async def test_r4_alternating_conversations_do_not_mix(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    for name in ("a", "b"):
        await cluster.client.chat(turn(tools, f"hi {name}"), conversation_id=name)
    for name, number in (("b", 2), ("a", 1)):
        await cluster.client.chat(turn(tools, f"hi {name}", ANSWER, "go on"), conversation_id=name)
        assert cluster.p.bodies[-1]["kv_transfer_params"]["remote_request_id"] == f"decode0-{number}"


async def test_r5_ids_are_compared_for_equality_only(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(decode=2)
    for number in range(1, 21):
        await cluster.client.chat(turn(tools, f"hi {number}"), conversation_id=f"s-{number}")
    assert {len(d.requests) for d in cluster.decode} == {10}
    await cluster.client.chat(turn(tools, "hi 1", ANSWER, "more"), conversation_id="s-10")
    assert not handed(cluster)


async def test_r5_requests_without_id_and_with_one_system_prompt_spread(make_cluster: Any) -> None:
    cluster = await make_cluster(decode=2)
    system = {"role": "system", "content": "be brief"}
    for number in range(20):
        messages = [system, {"role": "user", "content": f"q{number}"}]
        await cluster.client.chat(messages=messages)
    assert {len(d.requests) for d in cluster.decode} == {10}
    assert {len(p.requests) for p in cluster.prefill} == {20}


async def test_a_conversation_without_id_is_recognised_by_its_history(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(decode=2)
    await cluster.client.chat(turn(tools, FIRST))
    holder = next(d for d in cluster.decode if d.requests)
    for _ in range(3):
        await cluster.client.chat(turn(tools, "something else"))
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"))
    assert handed(cluster)
    assert holder.bodies[-1]["messages"][-1]["content"] == "more"


async def test_recognition_can_be_switched_off(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(conversations={"recognise": False})
    await cluster.client.chat(turn(tools, FIRST))
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"))
    assert not handed(cluster)


async def test_reuse_off_keeps_nothing(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(reuse="off")
    await first_turn(cluster)
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c")
    assert not handed(cluster)
    assert cluster.metric("references") == 0


async def test_r7_salts_go_to_both_hops_and_nowhere_else(make_cluster: Any, caplog: Any) -> None:
    caplog.set_level("DEBUG")
    cluster = await make_cluster()
    await cluster.client.chat(cache_salt="canary-salt")
    assert cluster.p.bodies[0]["cache_salt"] == cluster.d.bodies[0]["cache_salt"] == "canary-salt"
    assert "canary-salt" not in caplog.text
    assert b"canary-salt" not in (await cluster.client("/metrics")).body


async def test_r7_images_of_equal_url_length_differ(make_cluster: Any) -> None:
    cluster = await make_cluster()

    def body(url: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    await cluster.client.chat(messages=body("http://i/a.png"), conversation_id="c")
    more = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "more"}]
    await cluster.client.chat(messages=body("http://i/b.png") + more, conversation_id="c")
    assert not handed(cluster)


async def test_an_engine_that_came_back_as_another_loses_its_references(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    await first_turn(cluster)
    cluster.d.engine_id = "reborn"
    await cluster.client.chat(turn(tools, "other"), conversation_id="other")
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c")
    assert not handed(cluster)
    assert cluster.metric("reuse_refused_total", reason="engine_restarted") == 1


async def test_text_completions_reuse_on_exact_append(make_cluster: Any) -> None:
    for sent, reused in (("Once" + ANSWER + " more", True), ("Once Hello", False), ("Twice" + ANSWER + " more", False)):
        cluster = await make_cluster()
        body = {"model": "m", "prompt": "Once", "conversation_id": "c"}
        assert (await cluster.client("/v1/completions", body)).json["choices"][0]["text"] == ANSWER
        await cluster.client("/v1/completions", {**body, "prompt": sent})
        assert handed(cluster) is reused


async def test_the_reference_is_gone_when_the_prefill_engine_failed_with_it(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(prefill=2)
    await first_turn(cluster)
    for engine in cluster.prefill:

        async def fail(request: Any) -> None:
            request.reset()

        engine.handler = fail
    failing = {id(engine): len(engine.requests) for engine in cluster.prefill}
    await cluster.client.chat(turn(tools, FIRST, ANSWER, "more"), conversation_id="c")
    sent = [b["kv_transfer_params"] for e in cluster.prefill for b in e.bodies[failing[id(e)] :]]
    assert [("remote_request_id" in params) for params in sent].count(True) == 1
