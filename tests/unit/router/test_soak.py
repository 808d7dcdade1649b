"""Row M1: many conversations, leaving clients, failing and restarting engines; then nothing is left."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest

from kvduplex_router.compose import compose_ledger
from kvduplex_router.config import Reuse, build_config
from kvduplex_router.conversations.answer import Answer
from kvduplex_router.conversations.conversations import Continuation, Conversations
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.fleet.fleet import Fleet


def unreliable(engine: Any, dice: random.Random) -> Any:
    """An engine that sometimes refuses, breaks off, is slow, or changes its identity."""
    good = engine.answer

    async def handler(request: Any) -> None:
        roll = dice.random()
        if roll < 0.05:
            request.reset()
        elif roll < 0.10:
            await request.reply({"error": {"message": "no", "type": "x", "code": 500}}, 500)
        elif roll < 0.13:
            await request.reply({"error": {"message": "no", "type": "x", "code": 400}}, 400)
        elif roll < 0.16:
            await request.begin_stream()
            await request.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
            request.reset()
        else:
            if roll < 0.20:
                engine.engine_id = f"{engine.name}-{dice.random()}"
            if roll > 0.9:
                await asyncio.sleep(0.01)
            await good(request)

    return handler


async def one_turn(cluster: Any, tools: Any, dice: random.Random) -> int | None:
    """A turn that its client may leave at any moment; the status it got."""
    body = {**tools.chat_body(f"q{dice.randrange(30)}"), "stream": dice.random() < 0.5}
    if dice.random() < 0.5:
        body["conversation_id"] = f"c{dice.randrange(20)}"
    if dice.random() > 0.2:
        return (await cluster.client("/v1/chat/completions", body)).status  # type: ignore[no-any-return]
    _reader, writer = await cluster.client.send("/v1/chat/completions", body)
    await asyncio.sleep(dice.random() * 0.01)
    writer.transport.abort()
    return None


async def test_a_soak_leaves_nothing_behind(make_cluster: Any, tools: Any) -> None:
    dice = random.Random(7)
    cluster = await make_cluster(
        prefill=2, decode=2, breaker={"open_s": 0.05}, health={"interval_s": 0.2}, conversations={"max_count": 50}
    )
    for engine in [*cluster.prefill, *cluster.decode]:
        engine.handler = unreliable(engine, dice)

    async def client() -> list[int | None]:
        return [await one_turn(cluster, tools, dice) for _ in range(30)]

    statuses = [status for got in await asyncio.gather(*(client() for _ in range(16))) for status in got]
    assert statuses.count(200) > 200
    assert set(statuses) <= {None, 200, 400, 502, 503}
    await tools.eventually(cluster.idle, "all counters are back to 0")
    assert cluster.metric("references") <= 50
    for engine in [*cluster.prefill, *cluster.decode]:
        engine.handler = engine.answer
    await asyncio.sleep(0.1)  # breakers close again
    answers = [await cluster.client.chat() for _ in range(4)]
    assert {answer.status for answer in answers} == {200}
    own = psutil.Process()
    await tools.eventually(lambda: len(own.net_connections(kind="tcp")) < 60, "connections are closed")


class Service:
    """A lease endpoint that agrees to everything."""

    def __init__(self, _endpoint: str) -> None:
        self.released = 0

    async def hello(self) -> Any:
        return SimpleNamespace(engine_id="e")

    async def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> frozenset[str]:
        return frozenset(lease_ids)

    async def release(self, lease_ids: Iterable[str]) -> frozenset[str]:
        self.released += len(list(lease_ids))
        return frozenset()

    async def close(self) -> None: ...


@pytest.mark.parametrize("leased", [True, False])
async def test_m1_one_shot_conversations_stay_within_bounds_and_end_without_traffic(leased: bool) -> None:
    now = [0.0]
    decode = "http://d:1#lease=d:2" if leased else "http://d:1"
    config = build_config(None, prefill=["http://p:1"], decode=[decode], conversations={"max_count": 1000})
    service = compose_ledger(config, clock=lambda: now[0], lease_service=Service)
    for number in range(20_000):
        now[0] += 0.001
        reference = Reference(
            "d:1", now[0], lease=f"{number}" if leased else None, params=None if leased else b"x" * 300
        )
        service.ledger.put(number.to_bytes(16, "big"), reference, 60.0)
    counts = service.ledger.counts_now()
    assert counts["references"] == 1000
    assert counts["leases_renewed"] == (1000 if leased else 0)
    now[0] += 1000
    await service.keeper.renew_all()
    service.local.sweep()
    await service.keeper.release_all()
    assert set(service.ledger.counts_now().values()) == {0}


def test_a_reference_keeps_no_more_memory_alive_than_it_counts() -> None:
    config = build_config(None, prefill=["http://p:1"], decode=["http://d:1"])
    kept: list[Reference] = []
    ledger: Any = SimpleNamespace(put=lambda _key, reference, _keep_s: kept.append(reference))
    conversations = Conversations(
        fleet=Fleet(), ledger=ledger, reuse=Reuse.STOCK, config=config.conversations, clock=lambda: 0.0
    )
    history: Any = SimpleNamespace(end=None)
    engine: Any = SimpleNamespace(name="d:1", identity="e")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(200):
            params = orjson.dumps({"remote_block_ids": [list(range(number, number + 40))]})
            continuation = Continuation(number.to_bytes(16, "big"), history)
            conversations.keep_params(continuation, engine, params, Answer(b"a"))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < sum(reference.size for reference in kept)
