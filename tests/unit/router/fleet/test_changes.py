"""Engines that come, go, drain and do not fit, seen by clients of a running router."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

KEY = {"authorization": "Bearer admin-secret"}


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY", "admin-secret")


ADMIN = {"admin": {"key_env": "ADMIN_KEY"}}


def facts(version: str = "0.32.0", root: str = "/models/m", block_size: int = 32) -> dict[str, Any]:
    metrics = f'\nvllm:cache_config_info{{block_size="{block_size}",cache_dtype="auto"}} 1.0\n'
    return {"/version": {"version": version}, "/metrics": metrics.encode(), "root": root}


async def engines_of(router: Any) -> dict[str, Any]:
    answer = await router.client("/admin/engines", None, KEY)
    return {engine["name"]: engine for engine in answer.json}


class Load:
    """Clients that ask without a pause, and what they were answered."""

    def __init__(self, router: Any, count: int = 4) -> None:
        self.router = router
        self.statuses: list[int] = []
        self._going = True
        self._tasks = [asyncio.create_task(self._ask(f"c{i}")) for i in range(count)]

    async def _ask(self, conversation: str) -> None:
        while self._going:
            number = len(self.statuses)  # prompts that share nothing, so that every policy spreads them
            body = {"messages": [{"role": "user", "content": f"{number} {conversation}"}]}
            answer = await self.router.client.chat(body, stream=number % 2 == 0)
            self.statuses.append(answer.status)

    async def end(self) -> list[int]:
        self._going = False
        await asyncio.gather(*self._tasks)
        return self.statuses


async def test_engines_of_a_watched_file_come_and_go_without_a_failed_request(
    make_cluster: Any, tools: Any, tmp_path: Path
) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("engines: []")
    router = await make_cluster(
        prefill=0, decode=0, engines=1, discovery={"file": str(path), "file_interval_s": 0.02}, **ADMIN
    )
    fleet = router.router.fleet
    load = Load(router)
    more = [tools.Engine(f"more{i}") for i in range(2)]
    try:
        for _ in range(4):
            for engine in more:
                engine.requests.clear()
                await engine.start()
            path.write_text(json.dumps({"engines": [engine.url for engine in more]}))
            await tools.eventually(lambda: all(len(engine.requests) > 2 for engine in more), "they are used")
            path.write_text("engines: []")
            await tools.eventually(lambda: len(fleet.engines) == 1, "they are let go")
            await tools.eventually(lambda: not any(engine.connections_open for engine in more), "and left alone")
            for engine in more:
                await engine.stop()
    finally:
        statuses = await load.end()
        for engine in more:
            await engine.stop()
    assert set(statuses) == {200}
    assert len(statuses) > 20


async def test_an_engine_that_joins_is_used_only_once_it_answers(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=1, **ADMIN)
    new = tools.Engine("new")
    new.healthy = False
    await new.start()
    try:
        added = await router.client("/admin/engines", {"url": new.url, "name": "new", "role": "replica"}, KEY)
        assert (added.status, added.json["health"], added.json["usable"]) == (201, "down", False)
        for number in range(6):
            await router.client.chat(tools.chat_body(f"prompt {number}"))
        assert new.requests == []
        new.healthy = True
        await tools.eventually(lambda: router.router.fleet.find("new").usable)
        await router.client("/admin/engines/engines0/drain", {}, KEY)
        assert (await router.client.chat()).status == 200
        assert len(new.requests) == 1
    finally:
        await new.stop()


async def test_operators_add_change_drain_and_remove(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=2, **ADMIN)
    misfit = {"url": router.replicas[0].url, "name": "p", "role": "prefill"}
    refused = await router.client("/admin/engines", misfit, KEY)
    assert (refused.status, "does not fit a fleet that has replica engines" in refused.body.decode()) == (409, True)
    bad = await router.client("/admin/engines", {"url": "ftp://x", "role": "replica"}, KEY)
    assert (bad.status, bad.json["error"]["param"]) == (400, "url")
    gone = await router.client("/admin/engines/engines1", None, KEY, method="DELETE")
    assert gone.status == 200
    assert set(await engines_of(router)) == {"engines0"}
    assert (await router.client("/admin/engines/engines1", None, KEY, method="DELETE")).status == 404
    before = len(router.replicas[1].requests)
    for _ in range(6):
        assert (await router.client.chat()).status == 200
    assert len(router.replicas[1].requests) == before
    await router.client("/admin/engines/engines0/drain", {}, KEY)
    assert (await router.client.chat()).status == 503
    entry = {"url": router.replicas[1].url, "name": "engines1", "role": "replica", "max_in_flight": 3}
    assert (await router.client("/admin/engines", entry, KEY)).status == 201
    await tools.eventually(lambda: router.router.fleet.find("engines1").usable)
    assert (await router.client.chat()).status == 200
    sources = (await router.client("/admin/discovery", None, KEY)).json
    assert sources["sources"] == [
        {"name": "admin", "engines": 1, "error": None},
        {"name": "config", "engines": 2, "error": None},
    ]


async def test_what_an_engine_does_when_it_is_removed_goes_on(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=1, **ADMIN)
    go_on = asyncio.Event()
    answer = router.replicas[0].handler

    async def slow(request: Any) -> None:
        await go_on.wait()
        await answer(request)

    router.replicas[0].handler = slow
    turn = asyncio.create_task(router.client.chat(stream=True))
    await tools.eventually(lambda: router.replicas[0].requests)
    await router.client("/admin/engines/engines0", None, KEY, method="DELETE")
    assert (await router.client.chat()).status == 503
    go_on.set()
    assert (await turn).text == "Hello there"
    await tools.eventually(lambda: router.replicas[0].connections_open == 0, "its connections are closed")


async def test_a_waiting_request_is_served_by_an_engine_that_joins(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=1, entries=lambda _e: {"max_in_flight": 1}, **ADMIN)
    hold = asyncio.Event()

    async def never(request: Any) -> None:
        await hold.wait()
        await request.reply({})

    router.replicas[0].handler = never
    first = asyncio.create_task(router.client.chat())
    await tools.eventually(lambda: router.replicas[0].requests)
    second = asyncio.create_task(router.client.chat())
    await tools.eventually(lambda: router.metric("queued") == 1)
    new = tools.Engine("new")
    await new.start()
    try:
        await router.client("/admin/engines", {"url": new.url, "name": "new", "role": "replica"}, KEY)
        assert (await second).status == 200
        assert len(new.requests) == 1
    finally:
        hold.set()
        await first
        await new.stop()


# -- compatibility -----------------------------------------------------------------------------------------------


async def known(router: Any, tools: Any, count: int) -> None:
    engines = router.router.fleet.engines
    await tools.eventually(lambda: len([e for e in engines if e.traits and e.traits.server]) == count, "all are known")


async def join(router: Any, tools: Any, role: str, name: str, what: dict[str, Any]) -> Any:
    engine = tools.Engine(name)
    engine.facts = what
    await engine.start()
    await router.client("/admin/engines", {"url": engine.url, "name": name, "role": role}, KEY)
    await tools.eventually(lambda: router.router.fleet.find(name).traits is not None, f"{name} is known")
    return engine


async def test_engines_that_do_not_fit_are_never_paired_and_named_once(
    make_cluster: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "kvduplex.router.fleet")
    router = await make_cluster(reuse="stock", **ADMIN)
    extra = []
    try:
        extra += [
            await join(router, tools, role, f"new-{role}", facts(block_size=16)) for role in ("prefill", "decode")
        ]
        for engine in (router.p, router.d):
            engine.facts = facts()
            engine.healthy = False
        fleet = router.router.fleet
        await tools.eventually(lambda: not fleet.find("prefill0").usable and not fleet.find("decode0").usable)
        for engine in (router.p, router.d):
            engine.healthy = True
        await known(router, tools, 4)
        await tools.eventually(lambda: fleet.mixed and all(e.usable for e in fleet.engines), "two groups serve")
        for turn in range(12):
            body = tools.chat_body(*["hi", "Hello there"] * (turn % 3), "more")
            assert (await router.client.chat(body, conversation_id=f"c{turn % 4}")).status == 200
        assert len(extra[1].requests) > 2
        assert len(router.d.requests) > 2
        for decode, prefill in ((router.d, router.p), (extra[1], extra[0])):
            assert [r.headers["x-request-id"] for r in decode.requests] == [
                r.headers["x-request-id"] for r in prefill.requests
            ]
        odd = await join(router, tools, "decode", "odd", facts(version="0.31.0"))
        extra.append(odd)
        described = (await engines_of(router))["odd"]
        assert described["traits"]["version"] == "0.31.0"
        assert not described["usable"]
        reason = "it can be paired with none: with prefill engine prefill0 version 0.32.0 against 0.31.0"
        assert reason in described["shut_because"]["incompatible"]
        for _ in range(6):
            await router.client.chat()
        assert odd.requests == []
        await asyncio.sleep(0.2)  # some probes more
        assert len([r for r in caplog.records if "decode engine odd is left out" in r.message]) == 1
        odd.facts = facts()
        odd.healthy = False
        await tools.eventually(lambda: fleet.find("odd").health == "down")
        odd.healthy = True
        await tools.eventually(lambda: fleet.find("odd").usable, "it was upgraded")
    finally:
        for engine in extra:
            await engine.stop()


async def test_a_pair_that_does_not_fit_serves_nothing_and_says_why(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(**ADMIN)
    router.p.facts, router.d.facts = facts(), facts(root="/models/other")
    for engine in (router.p, router.d):
        engine.healthy = False
    fleet = router.router.fleet
    await tools.eventually(lambda: all(e.health == "down" for e in fleet.engines))
    for engine in (router.p, router.d):
        engine.healthy = True
    await tools.eventually(lambda: all(e.shut_because for e in fleet.engines))
    assert (await router.client.chat()).status == 503
    ready = await router.client("/ready")
    assert ready.status == 503
    assert "model /models/m against /models/other" in ready.body.decode()
    assert router.p.requests == []


async def test_sglang_replicas_serve_and_are_described(make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(prefill=0, decode=0, engines=1, **ADMIN)
    exposition = b'\nsglang:num_running_reqs{model_name="m"} 2.0\nsglang:token_usage{model_name="m"} 0.5\n'
    info = {"model_path": "/models/m", "page_size": 1, "version": "0.5.6"}
    sglang = await join(router, tools, "replica", "sglang", {"/get_server_info": info, "/metrics": exposition})
    try:
        await tools.eventually(lambda: router.router.fleet.find("sglang").usable)
        await router.client("/admin/engines/engines0/drain", {}, KEY)
        assert (await router.client.chat()).status == 200
        assert len(sglang.requests) == 1
        described = (await engines_of(router))["sglang"]
        assert described["traits"] == {
            "server": "sglang", "version": "0.5.6", "model": "/models/m", "block_size": 1, "cache_dtype": None,
            "names": ["m"],
        }  # fmt: skip
        assert described["load"] == {"running": 2.0, "waiting": None, "kv_usage": 0.5}
    finally:
        await sglang.stop()
