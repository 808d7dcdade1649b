"""One turn over a prefill and a decode engine, and the next turn's reuse, as a client sees it."""

from __future__ import annotations

from typing import Any


async def test_a_chat_turn_goes_through_both_engines(make_cluster: Any) -> None:
    cluster = await make_cluster()
    answer = await cluster.client.chat(temperature=0.5, max_tokens=7)
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == "Hello there"
    assert "kv_transfer_params" not in answer.json
    assert answer.headers["x-kvduplex-plan"] == "recompute"
    assert answer.headers["x-kvduplex-cached-tokens"] == "3"
    prefill, decode = cluster.p.bodies[0], cluster.d.bodies[0]
    assert prefill["max_tokens"] == 1
    assert prefill["stream"] is False
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert decode["max_tokens"] == 7
    assert decode["kv_transfer_params"]["remote_request_id"] == "prefill0-1"
    assert cluster.p.requests[0].headers["x-request-id"] == cluster.d.requests[0].headers["x-request-id"]
    assert cluster.idle()


async def test_a_stream_is_passed_on_without_our_frame(make_cluster: Any) -> None:
    cluster = await make_cluster()
    answer = await cluster.client.chat(stream=True)
    assert answer.status == 200
    assert answer.text == "Hello there"
    assert answer.events[-1] == "[DONE]"
    assert b"kv_transfer_params" not in answer.body
    assert cluster.metric("ttft_seconds_count", api="chat") == 1


async def test_the_second_turn_hands_the_reference_to_prefill_once(make_cluster: Any, tools: Any) -> None:
    for stream in (False, True):
        cluster = await make_cluster()
        await cluster.client.chat(conversation_id="c1", stream=stream)
        second = tools.chat_body("hi", "Hello there", "and then?")
        answer = await cluster.client.chat(second, conversation_id="c1", stream=stream)
        assert answer.headers["x-kvduplex-plan"] == "pull"
        handed = cluster.p.bodies[1]["kv_transfer_params"]
        assert handed["remote_request_id"] == "decode0-1"
        assert handed["do_remote_decode"] is True
        assert handed["do_remote_prefill"] is False
        assert "conversation_id" not in cluster.p.bodies[1]
        again = await cluster.client.chat(second, conversation_id="c1", stream=stream)
        assert again.headers["x-kvduplex-plan"] == "recompute"


async def test_models_health_ready_and_metrics(make_cluster: Any) -> None:
    cluster = await make_cluster()
    assert (await cluster.client("/v1/models")).json["data"] == [{"id": "m", "object": "model"}]
    assert (await cluster.client("/health")).status == 200
    assert (await cluster.client("/ready")).status == 200
    await cluster.client.chat()
    text = (await cluster.client("/metrics")).body.decode()
    assert 'kvduplex_router_turns_total{api="chat",outcome="ok",plan="recompute"} 1.0' in text
    assert "/v1/chat/completions" in (await cluster.client("/openapi.json")).json["paths"]
