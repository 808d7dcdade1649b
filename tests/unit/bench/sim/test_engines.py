"""Simulated engines over real sockets: official clients, real lease clients, real subscribers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import msgspec
import openai
import pytest
import zmq
import zmq.asyncio

from kvduplex_bench.sim.errors import SimError
from kvduplex_bench.sim.fleet import SimFleet
from kvduplex_bench.sim.settings import Connector, EngineSettings, Role
from kvduplex_transfer.leases.client import AsyncLeaseClient
from kvduplex_transfer.leases.params import ClaimOffer, Retention, prefill_params

MakeSettings = Callable[..., EngineSettings]
LONG = " ".join(["the quick brown fox reads data"] * 40)


def client_of(settings: EngineSettings) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{settings.address.url}/v1", api_key="none", max_retries=0, timeout=20)


async def post(settings: EngineSettings, **body: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=20) as client:
        reply = await client.post(f"{settings.address.url}/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


async def until(met: Callable[[], bool]) -> None:
    """Wait for a condition, ten seconds at most."""
    async with asyncio.timeout(10):
        while not met():  # noqa: ASYNC110 - nothing of ours may be told
            await asyncio.sleep(0.002)


async def counters(settings: EngineSettings) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=20) as client:
        text = (await client.get(f"{settings.address.url}/metrics")).text
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}


async def test_the_official_client_gets_whole_and_streamed_answers(make_settings: MakeSettings) -> None:
    settings = make_settings()
    messages: list[Any] = [{"role": "user", "content": LONG}]
    async with SimFleet([settings]), client_of(settings) as client:
        whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model="tiny", prompt=LONG, max_tokens=3)
        named = [model.id async for model in client.models.list()]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    pieces = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert pieces == whole.choices[0].message.content
    last = chunks[-1].usage
    assert last is not None
    assert last.prompt_tokens_details is not None
    assert last.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // 32 * 32
    assert text.usage is not None
    assert text.usage.completion_tokens == 3
    assert named == ["tiny"]


async def test_the_next_turn_finds_prompt_and_answer(make_settings: MakeSettings) -> None:
    settings = make_settings()
    async with SimFleet([settings]):
        first = await post(settings, messages=[{"role": "user", "content": LONG}], max_tokens=64)
        answer = first["choices"][0]["message"]["content"]
        history = [{"role": "user", "content": LONG}, {"role": "assistant", "content": answer}]
        second = await post(settings, messages=[*history, {"role": "user", "content": "go on"}], max_tokens=1)
    had = first["usage"]["prompt_tokens"] + 64 - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == had // 32 * 32


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/chat/completions", b"{", 400, "not JSON"),
        ("/v1/chat/completions", b"[]", 400, "not a JSON object"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "messages"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, "max_tok"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400, "n above 1"),
        ("/v1/completions", b'{"prompt": "x", "model": "other"}', 404, "does not exist"),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 5000}', 400, "maximum context length is 4096"),
        ("/v1/nothing", b"{}", 404, "Not Found"),
        ("/sim/faults", b'{"slow": 0}', 400, "slow must be"),
        ("/sim/faults", b'{"sloww": 1}', 400, "sloww"),
    ],
)
async def test_bad_requests_are_refused_in_openai_form(
    make_settings: MakeSettings, path: str, body: bytes, status: int, said: str
) -> None:
    settings = make_settings()
    async with SimFleet([settings]), httpx.AsyncClient(base_url=settings.address.url, timeout=20) as client:
        reply = await client.post(path, content=body)
    assert reply.status_code == status
    assert said in reply.json()["error"]["message"]


async def test_a_client_that_leaves_frees_its_blocks(make_settings: MakeSettings) -> None:
    settings = make_settings()
    async with SimFleet([settings]) as fleet:
        async with client_of(settings) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": LONG}], max_tokens=3000, stream=True
            )
            await anext(aiter(stream))
            await stream.close()
        core = fleet.engines[0].core
        await until(lambda: core.counts.aborted > 0)
        assert core.pool.free == core.pool.total


async def test_kv_goes_forward_and_comes_back_under_a_lease(make_settings: MakeSettings) -> None:
    prefill, decode = make_settings(Role.PREFILL), make_settings(Role.DECODE)
    messages = [{"role": "user", "content": LONG}]
    async with SimFleet([prefill, decode]) as fleet:
        first = await post(prefill, messages=messages, max_tokens=1, kv_transfer_params=prefill_params())
        handed = {**first["kv_transfer_params"], **Retention("turn-1", 30.0).to_params()}
        answered = await post(decode, messages=messages, max_tokens=70, kv_transfer_params=handed)
        assert answered["kv_transfer_params"]["lease"]["id"] == "turn-1"
        assert (await counters(decode))["vllm:external_prefix_cache_hits_total"] > 0
        await until(lambda: not fleet.engines[0].core.kept_for_readers)
        async with httpx.AsyncClient(base_url=prefill.address.url) as client:
            await client.post("/reset_prefix_cache")

        endpoint = f"tcp://127.0.0.1:{decode.address.lease}"
        keeper = AsyncLeaseClient(endpoint)
        assert (await keeper.hello()).held == 1
        assert await keeper.renew(["turn-1", "other"]) == {"turn-1"}
        answer = answered["choices"][0]["message"]["content"]
        longer = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
        offer = ClaimOffer("turn-1", endpoint).to_params()
        second = await post(prefill, messages=longer, max_tokens=1, kv_transfer_params=offer)
        had = first["usage"]["prompt_tokens"] + 70 - 1
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == had // 32 * 32
        await until(lambda: not fleet.engines[1].core.table.snapshot().held)
        assert (await keeper.hello()).held == 0
        again = await post(prefill, messages=[*messages, {"role": "user", "content": LONG}], kv_transfer_params=offer)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] < had
        assert fleet.engines[0].transfers.refused == {"consumed": 1}
        await keeper.close()


async def test_a_dead_prefill_engine_makes_the_decode_engine_compute(make_settings: MakeSettings) -> None:
    prefill, decode = make_settings(Role.PREFILL), make_settings(Role.DECODE)
    messages = [{"role": "user", "content": LONG}]
    async with SimFleet([decode]) as fleet:
        async with SimFleet([prefill]):
            first = await post(prefill, messages=messages, max_tokens=1, kv_transfer_params=prefill_params())
        answered = await post(decode, messages=messages, max_tokens=2, kv_transfer_params=first["kv_transfer_params"])
        assert answered["usage"]["completion_tokens"] == 2
        assert fleet.engines[0].core.counts.external == 0


async def test_the_stock_connector_is_read_without_a_claim(make_settings: MakeSettings) -> None:
    prefill, decode = (make_settings(role, Connector.STOCK) for role in (Role.PREFILL, Role.DECODE))
    messages = [{"role": "user", "content": LONG}]
    async with SimFleet([prefill, decode]) as fleet:
        first = await post(prefill, messages=messages, max_tokens=1, kv_transfer_params=prefill_params())
        answered = await post(decode, messages=messages, max_tokens=40, kv_transfer_params=first["kv_transfer_params"])
        params = answered["kv_transfer_params"]
        assert params["do_remote_decode"]
        assert params["remote_blocks_expiry_time"] > 0
        fleet.engines[0].core.pool.clear()
        text = answered["choices"][0]["message"]["content"]
        longer = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        second = await post(prefill, messages=longer, max_tokens=1, kv_transfer_params=params)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] + 39


async def test_events_are_published_and_replayed_as_vllm_does(make_settings: MakeSettings) -> None:
    settings = make_settings()
    context = zmq.asyncio.Context()
    subscriber, replay = context.socket(zmq.SUB), context.socket(zmq.REQ)
    try:
        async with SimFleet([settings]):
            subscriber.connect(f"tcp://127.0.0.1:{settings.address.events}")
            subscriber.subscribe(b"")
            reply = await post(settings, messages=[{"role": "user", "content": LONG}], max_tokens=2)
            replay.connect(f"tcp://127.0.0.1:{settings.address.replay}")
            async with asyncio.timeout(10):
                await replay.send((0).to_bytes(8, "big"))
                frames = await replay.recv_multipart()
                assert int.from_bytes(frames[1], "big") == 0
                _, events, rank = msgspec.msgpack.decode(frames[2])
                assert rank == 0
                stored = events[0]
                assert stored["type"] == "BlockStored"
                assert stored["parent_block_hash"] is None
                assert len(stored["block_hashes"]) == reply["usage"]["prompt_tokens"] // 32
                assert len(stored["token_ids"]) == 32 * len(stored["block_hashes"])
                number = 0
                while not await subscriber.poll(200):  # a subscription takes a moment, as with a real engine
                    number += 1
                    await post(settings, messages=[{"role": "user", "content": f"{number} {LONG}"}], max_tokens=40)
                topic, sequence, payload = await subscriber.recv_multipart()
            assert topic == b""
            assert int.from_bytes(sequence, "big") >= 0
            assert msgspec.msgpack.decode(payload)[1]
    finally:
        context.destroy(linger=0)


async def test_failures_come_on_command(make_settings: MakeSettings) -> None:
    settings = make_settings()
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    async with SimFleet([settings]) as fleet, httpx.AsyncClient(base_url=settings.address.url, timeout=20) as client:
        assert (await client.post("/sim/faults", json={"error_rate": 1, "unhealthy": True})).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 500
        assert (await client.get("/health")).status_code == 503
        await client.post("/sim/faults", json={"break_rate": 1})
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/chat/completions", json={**chat, "stream": True})
        await client.post("/sim/faults", json={"hang": True})
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=chat, timeout=0.3)
        await client.post("/sim/faults", json={"kill": True})
        await until(lambda: not fleet.engines)
        with pytest.raises(httpx.TransportError):
            await client.get("/health")


async def test_a_graceful_end_finishes_answers(make_settings: MakeSettings) -> None:
    settings = make_settings()
    fleet = SimFleet([settings])
    await fleet.__aenter__()
    asked = asyncio.create_task(post(settings, messages=[{"role": "user", "content": "hello"}], max_tokens=200))
    await until(lambda: fleet.engines[0].core.scheduler.running > 0)
    await fleet.close(grace_s=10)
    assert (await asked)["usage"]["completion_tokens"] == 200


async def test_a_graceful_end_begins_no_answer_that_it_would_break(make_settings: MakeSettings) -> None:
    """A client that reuses its connection at once may send its request elsewhere while nothing of it was answered."""
    settings = make_settings()
    fleet = SimFleet([settings])
    await fleet.__aenter__()
    chat = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    long = asyncio.create_task(post(settings, messages=chat["messages"], max_tokens=1500))
    reader, writer = await asyncio.open_connection("127.0.0.1", settings.address.port)
    for tokens in (200, 3000):  # the second request waits behind the first
        body = msgspec.json.encode({**chat, "max_tokens": tokens})
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await until(lambda: fleet.engines[0].core.scheduler.running == 2)
    await fleet.close(grace_s=10)
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    assert received.count(b"HTTP/1.1 200 OK") == 1
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert (await long)["usage"]["completion_tokens"] == 1500


async def test_a_taken_port_is_named(make_settings: MakeSettings) -> None:
    settings = make_settings()
    async with SimFleet([settings]):
        with pytest.raises(SimError, match=f"{settings.address.port} cannot be served"):
            await SimFleet([settings]).__aenter__()
