"""Policies over real HTTP: which scripted engine gets which request."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvduplex_router.requests.apis import CHAT
from kvduplex_router.requests.body import Body
from kvduplex_router.tokens.files import load_files
from kvduplex_router.tokens.tokeniser import Tokeniser

LONG = "the of and to in a is that for it as was with be by on not he his but " * 20
"""Some 400 tokens of the generated tokenizer; many more bytes than 200 tokens stand for without one."""


def conversation(name: str, turns: int = 1) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": LONG}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{name} {turn} {LONG}"})
        messages.append({"role": "assistant", "content": "Hello there"})
    return messages[:-1]


def served(cluster: Any) -> list[int]:
    return [len(engine.requests) for engine in cluster.replicas]


async def test_round_robin_goes_round(make_cluster: Any) -> None:
    cluster = await make_cluster(prefill=0, decode=0, engines=3, routing={"policy": "round_robin"})
    for _ in range(9):
        assert (await cluster.client.chat()).status == 200
    assert served(cluster) == [3, 3, 3]


async def test_requests_that_no_policy_looks_at_go_round_after_those_that_one_did(make_cluster: Any) -> None:
    """Both kinds number their picks together: else all of these would go where policies had sent least."""
    cluster = await make_cluster(prefill=0, decode=0, engines=3, routing={"policy": "session"})
    for turn in range(12):
        await cluster.client.chat(conversation_id="a", messages=conversation("a", turn + 1))
    before = served(cluster)
    for _ in range(9):
        await cluster.client("/v1/embeddings", {"model": "m", "input": "hi"})
    assert [now - then for now, then in zip(served(cluster), before, strict=True)] == [3, 3, 3]


async def test_a_session_stays_where_it_is_hashed_to(make_cluster: Any) -> None:
    cluster = await make_cluster(prefill=0, decode=0, engines=4, routing={"policy": "session"})
    tags: dict[str, set[str]] = {}
    for turn in range(3):
        for name in "abcdefgh":
            answer = await cluster.client.chat(conversation_id=name, messages=conversation(name, turn + 1))
            tags.setdefault(name, set()).add(answer.headers["x-kvduplex-engine"])
    assert all(len(seen) == 1 for seen in tags.values())
    assert len(set.union(*tags.values())) > 1
    assert cluster.metric("picks_total", **{"class": "default", "policy": "session", "reason": "session"}) == 24


async def test_sessions_without_an_id_are_known_by_how_they_began(make_cluster: Any) -> None:
    cluster = await make_cluster(prefill=0, decode=0, engines=4, routing={"policy": "session"})
    seen = set()
    for turns in (1, 2, 3):
        answer = await cluster.client.chat(messages=conversation("one", turns))
        seen.add(answer.headers["x-kvduplex-engine"])
    assert len(seen) == 1


@pytest.mark.parametrize("counted", [True, False], ids=["tokenizer", "estimate"])
async def test_a_conversation_goes_where_its_beginning_was_computed(
    make_cluster: Any, model: Path, counted: bool
) -> None:
    routing = {"policy": "prefix", **({"tokenizer": str(model)} if counted else {})}
    cluster = await make_cluster(prefill=0, decode=0, engines=4, routing=routing)
    for engine in cluster.replicas:
        engine.cached_tokens = None
    where: dict[str, set[str]] = {}
    for turn in range(1, 4):
        for name in "abcdef":
            answer = await cluster.client.chat(messages=conversation(name, turn), stream=True)
            where.setdefault(name, set()).add(answer.headers["x-kvduplex-engine"])
    assert all(len(seen) == 1 for seen in where.values()), "streams tell the router nothing, and need not"
    source = "tokenizer" if counted else "estimate"
    assert cluster.metric("prompts_total", source=source) == 18


async def test_a_busy_holder_is_passed_over_and_the_pick_says_so(make_cluster: Any, model: Path) -> None:
    cluster = await make_cluster(prefill=0, decode=0, engines=2, routing={"policy": "prefix", "tokenizer": str(model)})
    await cluster.client.chat(messages=conversation("a"))
    holder = next(engine for engine in cluster.replicas if engine.requests)
    release = asyncio.Event()
    quick = holder.handler

    async def slow(request: Any) -> None:
        await release.wait()
        await quick(request)

    holder.handler = slow
    other = next(engine for engine in cluster.replicas if engine is not holder)
    waiting: list[asyncio.Task[Any]] = []
    try:
        for _ in range(200):
            waiting.append(asyncio.create_task(cluster.client.chat(messages=conversation("a", 2), stream=True)))
            await asyncio.wait(waiting, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
            if other.requests:
                break
    finally:
        release.set()
        await asyncio.gather(*waiting)
    assert other.requests
    assert cluster.metric("picks_total", **{"class": "default", "policy": "prefix", "reason": "spill"}) >= 1
    assert cluster.idle()
    assert cluster.metric("pending_tokens", engine=holder.name) == 0


async def test_answers_in_one_piece_do_not_pile_up_at_the_only_holder(make_cluster: Any) -> None:
    """They teach no prices, so a count of requests must do."""
    cluster = await make_cluster(prefill=0, decode=0, engines=4, routing={"policy": "prefix"})
    await cluster.client.chat(messages=conversation("a"))
    release = asyncio.Event()
    for engine in cluster.replicas:
        quick = engine.handler

        async def slow(request: Any, quick: Any = quick) -> None:
            await release.wait()
            await quick(request)

        engine.handler = slow
    waiting = [asyncio.create_task(cluster.client.chat(messages=conversation("a", 2))) for _ in range(64)]
    try:
        async with asyncio.timeout(10):
            while sum(served(cluster)) < 65:  # noqa: ASYNC110 - scripted engines have no event for it
                await asyncio.sleep(0.01)
        assert max(served(cluster)) < 45
    finally:
        release.set()
        await asyncio.gather(*waiting)


async def test_short_prompts_and_unique_classes_are_spread_by_load(make_cluster: Any, model: Path) -> None:
    routing = {
        "policy": "prefix", "tokenizer": str(model), "classes": [{"name": "batch", "unique": True}],
    }  # fmt: skip
    cluster = await make_cluster(prefill=0, decode=0, engines=2, routing=routing)
    for _ in range(6):
        await cluster.client.chat(messages=[{"role": "user", "content": "short"}])
    for _ in range(6):
        await cluster.client.chat({"messages": conversation("same")}, {"x-kvduplex-class": "batch"})
    counts = Counter(
        {
            reason: cluster.metric("picks_total", **{"class": name, "policy": "prefix", "reason": reason})
            for name, reason in (("default", "overlap"), ("batch", "overlap"))
        }
    )
    assert not any(counts.values())
    assert cluster.metric("picks_total", **{"class": "batch", "policy": "prefix", "reason": "load"}) == 6
    assert min(served(cluster)) >= 3


async def test_classes_are_chosen_by_header_model_and_rule(make_cluster: Any) -> None:
    routing = {
        "policy": "least_in_flight",
        "classes": [
            {"name": "chat", "policy": "session"},
            {"name": "big", "policy": "round_robin", "match": [{"model": "big", "stream": False}, {"tools": True}]},
        ],
    }
    cluster = await make_cluster(prefill=0, decode=0, engines=2, routing=routing)
    await cluster.client.chat(conversation_id="c", headers=None)
    await cluster.client.chat({"conversation_id": "c"}, {"x-kvduplex-class": "chat"})
    await cluster.client.chat({}, {"x-kvduplex-class": "no such class"})
    await cluster.client.chat(model="big")
    await cluster.client.chat(model="big", stream=True)
    await cluster.client.chat(tools=[{"type": "function", "function": {"name": "f"}}])
    assert cluster.metric("picks_total", **{"class": "chat", "policy": "session", "reason": "session"}) == 1
    assert cluster.metric("picks_total", **{"class": "big", "policy": "round_robin", "reason": "round_robin"}) == 2


async def test_bodies_that_only_a_lenient_reader_takes_are_still_served(make_cluster: Any, model: Path) -> None:
    cluster = await make_cluster(prefill=0, decode=0, engines=1, routing={"policy": "prefix", "tokenizer": str(model)})
    body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert (await cluster.client("/v1/chat/completions", body)).status == 200
    assert (await cluster.client("/v1/chat/completions", {"model": "m", "messages": "odd"})).status == 200
    assert (await cluster.client("/v1/completions", {"model": "m", "prompt": [1, 2, 3]})).status == 200


async def test_kv_events_find_the_engine_that_holds_the_prompt(
    make_cluster: Any, model: Path, publisher: Callable[[], Any]
) -> None:
    """Engines say that they hold a prompt that the router never sent them."""
    publishers = [publisher(), publisher()]
    ports = iter(publishers)
    cluster = await make_cluster(
        prefill=0, decode=0, engines=2, routing={"policy": "kv_events", "tokenizer": str(model)},
        entries=lambda _engine: next(ports).entry,
    )  # fmt: skip
    messages = conversation("a", 2)
    body = Body.parse(json.dumps({"model": "m", "messages": messages}).encode())
    prompt = await Tokeniser(load_files(model)).prompt(CHAT, body)

    def holders() -> list[int]:
        return [i for i, e in enumerate(cluster.replicas) if cluster.metric("index_blocks", engine=e.name) > 0]

    for holder in (0, 1):
        other = publishers[1 - holder]
        other.clear()
        await publishers[holder].hold(prompt.tokens)
        await other.settled(lambda holder=holder: holders() == [holder])
        before = served(cluster)
        cluster.replicas[holder].cached_tokens = 10**6  # capped at the prompt's length by whoever reads it
        await cluster.client.chat(messages=messages)
        assert served(cluster)[holder] == before[holder] + 1


async def test_kv_events_find_the_rank_that_holds_the_prompt(
    make_cluster: Any, model: Path, publisher: Callable[..., Any], tools: Any
) -> None:
    """One server, two data-parallel ranks: each publishes what it holds, and the request names the one that does."""
    publishers = [publisher(4), publisher(5)]
    first = await make_cluster(prefill=0, decode=0, engines=1)
    server = first.replicas[0]
    parts = [f"kv_events={p.entry['kv_events']}&kv_replay={p.entry['kv_replay']}" for p in publishers]
    entries = [f"{server.url}#dp_rank={rank}&dp_start=4&{part}" for rank, part in enumerate(parts)]
    cluster = await first.another(engines=entries, routing={"policy": "kv_events", "tokenizer": str(model)})
    names = [engine.name for engine in cluster.router.fleet.engines]
    assert names == [f"127.0.0.1:{server.port}@0", f"127.0.0.1:{server.port}@1"]
    server.cached_tokens = 10**6
    for number, holder in enumerate((1, 0, 1)):
        messages = conversation(f"{number}", 2)
        body = Body.parse(json.dumps({"model": "m", "messages": messages}).encode())
        await publishers[holder].hold((await Tokeniser(load_files(model)).prompt(CHAT, body)).tokens)
        blocks = cluster.metric("index_blocks", engine=names[holder])
        await publishers[holder].settled(
            lambda blocks=blocks, name=names[holder]: cluster.metric("index_blocks", engine=name) > blocks
        )
        assert (await cluster.client.chat(messages=messages)).status == 200
        assert server.requests[-1].headers["x-data-parallel-rank"] == str(holder)
    assert cluster.metric("picks_total", **{"class": "default", "policy": "kv_events", "reason": "overlap"}) == 3
