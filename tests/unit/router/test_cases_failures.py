"""Rows E1-E10 and R6: engines that refuse, die, stall, break off or are not there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


async def _refuse(request: Any, status: int, message: str = "no", headers: str = "") -> None:
    await request.reply({"error": {"message": message, "type": "X", "code": status}}, status, headers)


async def _reset(request: Any) -> None:
    request.reset()


async def _hang(request: Any) -> None:
    await request.wait_gone()


async def _headers_then_reset(request: Any) -> None:
    await request.begin_stream()
    request.reset()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
async def test_e1_what_the_client_did_wrong_is_passed_on_and_hurts_no_engine(make_cluster: Any, status: int) -> None:
    cluster = await make_cluster(breaker={"failures": 3})
    good = cluster.p.handler
    cluster.p.handler = lambda request: _refuse(request, status, "too bad", "retry-after: 7\r\n")
    for _ in range(20):
        answer = await cluster.client.chat()
        assert answer.status == status
        assert answer.json["error"]["message"] == "too bad"
        assert answer.headers["retry-after"] == "7"
    assert cluster.d.requests == []
    assert cluster.metric("breaker_open", engine="prefill0", role="prefill") == 0
    cluster.p.handler = good
    assert (await cluster.client.chat()).status == 200


async def test_e1_a_500_about_length_is_the_clients(make_cluster: Any) -> None:
    cluster = await make_cluster(breaker={"failures": 3})
    message = "This model's maximum context length is 4096 tokens"
    cluster.p.handler = lambda request: _refuse(request, 500, message)
    for _ in range(5):
        answer = await cluster.client.chat()
        assert answer.status == 500
        assert answer.json["error"]["message"] == message
    assert cluster.metric("breaker_open", engine="prefill0", role="prefill") == 0


@pytest.mark.parametrize(
    "shape", [b'{"detail":"Not Found"}', b'{"object":"error","message":"m","type":"t","code":404}']
)
async def test_e1_old_error_shapes_become_openai_errors(make_cluster: Any, shape: bytes) -> None:
    cluster = await make_cluster()
    cluster.p.handler = lambda request: request.reply(shape, 404)
    answer = await cluster.client.chat()
    assert answer.status == 404
    assert answer.json["error"]["message"] in ("Not Found", "m")


async def test_e1_a_refusal_in_html_is_not_shown(make_cluster: Any) -> None:
    cluster = await make_cluster()

    async def html(request: Any) -> None:
        await request.raw(b"HTTP/1.1 403 X\r\ncontent-type: text/html\r\ncontent-length: 14\r\n\r\n<b>10.0.0.1</b>")

    cluster.p.handler = html
    answer = await cluster.client.chat()
    assert answer.status == 403
    assert b"10.0.0.1" not in answer.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("handler", "status"),
    [
        (lambda r: _refuse(r, 400), 400),
        (lambda r: _refuse(r, 404), 404),
        (lambda r: _refuse(r, 429, headers="retry-after: 3\r\n"), 429),
        (lambda r: _refuse(r, 500), 502),
        (lambda r: _refuse(r, 503, headers="retry-after: 40\r\n"), 503),
        (lambda r: _refuse(r, 504), 504),
        (_reset, 502),
        (_headers_then_reset, 502),
    ],
    ids=["400", "404", "429", "500", "503", "504", "reset", "headers-then-reset"],
)
async def test_e2_a_failing_decode_engine(make_cluster: Any, handler: Any, status: int, stream: bool) -> None:
    cluster = await make_cluster(retries=0)
    cluster.d.handler = handler
    answer = await cluster.client.chat(stream=stream)
    assert answer.status == status
    assert answer.json["error"]["message"]
    assert "127.0.0.1" not in answer.body.decode()
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) > 0
    assert cluster.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_e2_a_dead_decode_engine(make_cluster: Any, stream: bool) -> None:
    cluster = await make_cluster(health={"interval_s": 60})
    await cluster.d.stop()
    answer = await cluster.client.chat(stream=stream)
    assert answer.status in (502, 503)
    assert answer.json["error"]["type"]
    assert cluster.idle()


async def test_e2_a_dead_decode_engine_is_replaced_with_the_same_blocks(make_cluster: Any) -> None:
    cluster = await make_cluster(decode=2, health={"interval_s": 60})
    await cluster.decode[0].stop()
    for _ in range(2):
        answer = await cluster.client.chat()
        assert answer.status == 200
    assert len(cluster.decode[1].requests) == 2
    assert len(cluster.p.requests) == 2  # nothing was computed twice


async def test_e2_a_decode_engine_that_broke_off_is_replaced_with_fresh_blocks(make_cluster: Any) -> None:
    cluster = await make_cluster(decode=2)
    cluster.decode[0].handler = _reset
    answers = [await cluster.client.chat() for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    given = [body["kv_transfer_params"]["remote_request_id"] for d in cluster.decode for body in d.bodies]
    assert len(given) == len(set(given)) == 4


@pytest.mark.parametrize("death", ["reset", "fin", "half_json", "bad_chunk", "silence"])
async def test_e4_a_stream_that_breaks(make_cluster: Any, tools: Any, death: str) -> None:
    cluster = await make_cluster(timeouts={"idle_s": 0.3})

    async def answer(request: Any) -> None:
        await request.begin_stream()
        for number in range(10):
            await request.event({"choices": [{"index": 0, "delta": {"content": str(number)}}]})
        await cluster.after_ten.wait()
        if death == "reset":
            request.reset()
        elif death == "half_json":
            await request.chunk(b'data: {"choices":[{"ind')
            request.writer.close()
        elif death == "bad_chunk":
            await request.raw(b"zz\r\nx\r\n")
        elif death == "silence":
            await request.wait_gone()
        else:
            request.writer.close()

    cluster.after_ten = asyncio.Event()
    cluster.d.handler = answer
    turn = asyncio.create_task(cluster.client.chat(stream=True, conversation_id="c"))
    await tools.eventually(lambda: cluster.d.requests, "the stream began")
    cluster.after_ten.set()
    got = await turn
    assert got.status == 200
    assert got.text == "0123456789"
    assert '"error"' in got.events[-1]
    assert sum('"error"' in event for event in got.events) == 1
    assert "finish_reason" not in got.body.decode()
    assert len(cluster.d.requests) == 1
    assert cluster.metric("references") == 0
    assert cluster.metric("turns_total", api="chat", plan="recompute", outcome="broken_stream") == 1
    assert cluster.idle()


@pytest.mark.parametrize("death", ["reset", "fin"])
async def test_e4_death_after_the_finish_reason_is_a_success(make_cluster: Any, death: str) -> None:
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        await request.begin_stream()
        await request.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        await request.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await asyncio.sleep(0.05)  # let the router read it; the reset would discard unread bytes
        request.reset() if death == "reset" else request.writer.close()

    cluster.d.handler = answer
    got = await cluster.client.chat(stream=True)
    assert got.text == "x"
    assert '"error"' not in got.body.decode()
    assert cluster.metric("turns_total", api="chat", plan="recompute", outcome="ok") == 1


async def test_e4_an_error_the_engine_reports_in_the_stream_is_passed_on(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        await request.begin_stream()
        await request.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        await request.event({"error": {"message": "KV load failed", "code": 500}})
        await request.event(b"[DONE]")
        await request.end_stream()

    cluster.d.handler = answer
    got = await cluster.client.chat(stream=True, conversation_id="c")
    assert "KV load failed" in got.body.decode()
    assert cluster.metric("references") == 0
    assert cluster.metric("turns_total", api="chat", plan="recompute", outcome="engine_error") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", ["empty", "no_frames", "html"])
async def test_never_a_200_without_content(make_cluster: Any, stream: bool, ending: str) -> None:
    cluster = await make_cluster(retries=0)

    async def answer(request: Any) -> None:
        if ending == "empty":
            await request.reply(b"")
        elif ending == "html":
            await request.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi")
        else:
            await request.begin_stream()
            await request.end_stream()

    cluster.d.handler = answer
    got = await cluster.client.chat(stream=stream)
    assert got.status == 502
    assert got.json["error"]["message"]


async def test_e5_policy_fail_says_why(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    await cluster.p.stop()
    await tools.eventually(cluster.router.fleet.missing, "the prober notices")
    answer = await cluster.client.chat()
    assert answer.status == 503
    assert "prefill" in answer.json["error"]["message"]
    ready = await cluster.client("/ready")
    assert ready.status == 503
    assert "no prefill engine answers" in ready.json["missing"][0]
    assert cluster.d.requests == []


async def test_e5_policy_decode_only_answers_and_shows_it(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(on_no_prefill="decode_only")
    await cluster.p.stop()
    answers = [await cluster.client.chat() for _ in range(3)]
    assert {answer.headers["x-kvduplex-plan"] for answer in answers} == {"decode_only"}
    assert cluster.metric("turns_total", api="chat", plan="decode_only", outcome="ok") == 3
    await tools.eventually(cluster.router.fleet.missing, "the prober notices")
    assert (await cluster.client("/ready")).status == 503


async def test_e7_one_silent_engine_does_not_hold_up_the_other(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(decode=2)
    cluster.decode[0].handler = _hang
    turns = [asyncio.create_task(cluster.client.chat()) for _ in range(60)]
    healthy = cluster.decode[1]
    await tools.eventually(
        lambda: sum(turn.done() for turn in turns) >= len(healthy.requests) > 20, "the healthy answer"
    )
    assert all(turn.result().status == 200 for turn in turns if turn.done())
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    await tools.eventually(cluster.idle, "counters are back to 0")


async def test_e7_a_silent_engine_ends_in_504(make_cluster: Any) -> None:
    cluster = await make_cluster(timeouts={"first_byte_s": 0.3}, retries=0)
    cluster.d.handler = _hang
    answer = await cluster.client.chat(stream=True)
    assert answer.status == 504
    assert cluster.idle()


async def test_e7_slow_answers_have_no_total_limit(make_cluster: Any) -> None:
    cluster = await make_cluster(timeouts={"first_byte_s": 0.6, "idle_s": 0.6})

    async def answer(request: Any) -> None:
        await asyncio.sleep(0.2)
        await request.begin_stream()
        for _ in range(6):
            await asyncio.sleep(0.2)
            await request.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        await request.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        await request.event(b"[DONE]")
        await request.end_stream()

    cluster.d.handler = answer
    got = await cluster.client.chat(stream=True)
    assert got.text == "xxxxxx"
    assert got.events[-1] == "[DONE]"


async def test_e9_a_probe_that_hangs_while_requests_succeed_means_busy(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(health={"interval_s": 0.05, "timeout_s": 0.05, "down_after": 2})
    cluster.d.hang_health = True
    await tools.eventually(lambda: cluster.d.hung_probes > 0, "a probe hangs")
    for _ in range(10):
        assert (await cluster.client.chat()).status == 200
    assert cluster.metric("engine_up", engine="decode0", role="decode") == 1


async def test_e9_hysteresis(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(health={"interval_s": 60, "down_after": 3, "up_after": 2})
    engine = cluster.router.fleet.decode[0]
    judged = []
    for good in (False, False, True, False, False, False, True, True):
        cluster.router.prober.judge(engine, good=good)
        judged.append(engine.health.value)
    assert judged == ["up", "up", "up", "up", "up", "down", "down", "up"]


async def test_e9_a_blip_cuts_no_stream_and_loses_no_reference(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    await cluster.client.chat(conversation_id="c")
    more = asyncio.Event()

    async def answer(request: Any) -> None:
        await request.begin_stream()
        await request.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        await more.wait()
        await request.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await request.event(b"[DONE]")
        await request.end_stream()

    good, cluster.d.handler = cluster.d.handler, answer
    turn = asyncio.create_task(cluster.client.chat(stream=True))
    await tools.eventually(lambda: len(cluster.d.requests) == 2, "the stream began")
    cluster.d.healthy = False
    await tools.eventually(cluster.router.fleet.missing, "the engine counts as down")
    cluster.d.healthy = True
    await tools.eventually(lambda: not cluster.router.fleet.missing(), "and up again")
    more.set()
    assert (await turn).events[-1] == "[DONE]"
    cluster.d.handler = good
    again = await cluster.client.chat(tools.chat_body("hi", "Hello there", "more"), conversation_id="c")
    assert again.headers["x-kvduplex-plan"] == "pull"


async def test_e9_many_requests_at_the_instant_the_first_engine_is_ready(make_cluster: Any) -> None:
    cluster = await make_cluster()
    answers = await asyncio.gather(*(cluster.client.chat() for _ in range(200)))
    assert {answer.status for answer in answers} == {200}
    assert cluster.idle()


async def test_e10_none_usable_is_503_and_all_full_is_429(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(limits={"queued": 0}, entries=lambda _e: {"max_in_flight": 1})
    cluster.p.handler = _hang
    first = asyncio.create_task(cluster.client.chat())
    await tools.eventually(lambda: cluster.p.requests, "the first is under way")
    full = await cluster.client.chat()
    assert full.status == 429
    assert int(full.headers["retry-after"]) > 0
    assert full.json["error"]["type"] == "overloaded_error"
    first.cancel()
    await tools.eventually(cluster.idle, "its places are free at once")
    assert cluster.metric("breaker_open", engine="prefill0", role="prefill") == 0
    await cluster.d.stop()
    await tools.eventually(cluster.router.fleet.missing, "the prober notices")
    gone = await cluster.client.chat()
    assert gone.status == 503
    assert int(gone.headers["retry-after"]) > 0


async def test_e10_queued_requests_are_served_in_order_and_may_leave(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(entries=lambda _e: {"max_in_flight": 1})
    release = asyncio.Event()
    good = cluster.p.handler

    async def wait(request: Any) -> None:
        await release.wait()
        await good(request)

    cluster.p.handler = wait
    turns = []
    for number in range(4):
        turns.append(asyncio.create_task(cluster.client.chat(user=str(number))))
        await tools.eventually(lambda n=number: cluster.metric("queued") == n, "it is queued")
    turns[2].cancel()
    await tools.eventually(lambda: cluster.metric("queued") == 2, "the one that left is gone from the queue")
    release.set()
    done = await asyncio.gather(*turns, return_exceptions=True)
    assert [getattr(answer, "status", None) for answer in done] == [200, 200, None, 200]
    assert [body["user"] for body in cluster.p.bodies] == ["0", "1", "3"]
    assert cluster.idle()


async def test_e10_waiting_too_long_is_429(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(limits={"queue_s": 0.1}, entries=lambda _e: {"max_in_flight": 1})
    cluster.p.handler = _hang
    first = asyncio.create_task(cluster.client.chat())
    await tools.eventually(lambda: cluster.p.requests, "the first is under way")
    assert (await cluster.client.chat()).status == 429
    first.cancel()
    await tools.eventually(cluster.idle, "all is over")


async def test_the_breaker_opens_on_the_engines_own_faults_and_closes_again(make_cluster: Any) -> None:
    now = [0.0]
    cluster = await make_cluster(
        prefill=2, breaker={"failures": 3, "open_s": 10}, clock=lambda: now[0], health={"interval_s": 0.05}
    )
    bad = cluster.prefill[0]
    working, bad.handler = bad.handler, _reset
    for _ in range(12):
        assert (await cluster.client.chat()).status == 200
    assert cluster.metric("breaker_open", engine="prefill0", role="prefill") == 1
    seen = len(bad.requests)
    await cluster.client.chat()
    assert len(bad.requests) == seen
    now[0] += 11
    bad.handler = working
    for _ in range(2):
        await cluster.client.chat()
    assert len(bad.requests) == seen + 1
    assert cluster.metric("breaker_open", engine="prefill0", role="prefill") == 0


async def test_r6_blocks_are_not_handed_on_after_their_time(make_cluster: Any) -> None:
    """The first decode engine stalls beyond the blocks' time, then cannot be reached: the next gets fresh ones."""
    now = [0.0]
    cluster = await make_cluster(decode=2, clock=lambda: now[0], conversations={"prefill_ttl_s": 20})

    async def stall(request: Any) -> None:
        now[0] += 35
        request.reset()

    cluster.decode[0].handler = stall
    for _ in range(2):
        assert (await cluster.client.chat()).status == 200
    given = [body["kv_transfer_params"]["remote_request_id"] for d in cluster.decode for body in d.bodies]
    assert len(set(given)) == len(given) == 4
    assert cluster.metric("handoff_seconds_count") == 4


async def test_an_idle_connection_that_the_engine_closed_costs_nothing(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    for _ in range(3):
        assert (await cluster.client.chat()).status == 200
        for engine in (cluster.p, cluster.d):
            engine.drop_connections()
    assert len(cluster.p.requests) == 3


async def test_idle_connections_are_retired_before_the_engine_closes_them(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster(timeouts={"keep_alive_s": 0.2}, health={"interval_s": 60})
    await cluster.client.chat()
    pools = [engine.pool for engine in cluster.router.fleet.engines]
    assert any(pool.open_connections for pool in pools)
    await tools.eventually(lambda: not any(pool.open_connections for pool in pools), "they are retired")
