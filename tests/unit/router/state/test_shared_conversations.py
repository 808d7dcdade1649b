"""Two routers, one server of conversations, and everything that can happen to it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from kvduplex_router.config import build_config
from kvduplex_router.errors import ConfigError

TTL_S = 1.0


def state_of(router: Any) -> bool:
    return bool(router.metric("state_up") == 1)


@pytest.fixture
async def pair(server: Any, leases: Any, make_cluster: Any, tools: Any) -> Any:
    """Two routers over one prefill and one leased decode engine, sharing conversations."""
    first = await make_cluster(
        entries=leases.entries,
        conversations={"lease_ttl_s": TTL_S, "keep_s": 30.0},
        state={"url": server.url, "retry_s": 0.05},
    )
    leases.script(first.d)
    second = await first.another()
    await tools.eventually(lambda: state_of(first) and state_of(second), "both reach the server")
    return first, second


def claims(router: Any) -> list[str]:
    offered = (body["kv_transfer_params"].get("lease_claim") for body in router.p.bodies)
    return [claim["id"] for claim in offered if claim is not None]


def named(router: Any) -> list[str]:
    return [body["kv_transfer_params"]["lease"]["id"] for body in router.d.bodies]


async def stored(server: Any, tools: Any, count: int) -> None:
    """References reach the server just after the client has its answer."""
    key = "kvduplex:{default}:turn:*"
    await tools.eventually(lambda: server.command("KEYS", key).startswith(b"*%d\r" % count), f"{count} stored")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_at_another_router(pair: Any, server: Any, tools: Any, stream: bool) -> None:
    first, second = pair
    history = ["hi"]
    for turn in range(4):
        router = (first, second)[turn % 2]
        answer = await router.client.chat(tools.chat_body(*history), conversation_id="c", stream=stream)
        assert answer.headers["x-kvduplex-plan"] == ("pull" if turn else "recompute")
        history += ["Hello there", f"more {turn}"]
        await stored(server, tools, 1)
    assert claims(first) == named(first)[:3]


async def test_a_conversation_without_an_id_is_recognised_by_another_router(pair: Any, server: Any, tools: Any) -> None:
    first, second = pair
    await first.client.chat()
    await stored(server, tools, 1)
    answer = await second.client.chat(tools.chat_body("hi", "what it said", "more"))
    assert answer.headers["x-kvduplex-plan"] == "pull"


async def test_no_handle_is_taken_twice_however_many_turns_race(pair: Any, server: Any, tools: Any) -> None:
    for round_number in range(5):
        ids = {"conversation_id": f"c{round_number}"}
        await pair[0].client.chat(ids)
        await stored(server, tools, round_number + 1)
        await asyncio.gather(*(pair[i % 2].client.chat(ids) for i in range(8)))
        await stored(server, tools, round_number + 1)
    taken = claims(pair[0])
    assert len(taken) == len(set(taken)) >= 5


async def test_stock_parameters_are_shared_too(server: Any, make_cluster: Any, tools: Any) -> None:
    first = await make_cluster(reuse="stock", state={"url": server.url, "retry_s": 0.05})
    second = await first.another()
    await tools.eventually(lambda: state_of(first) and state_of(second))
    await first.client.chat(conversation_id="c")
    await stored(server, tools, 1)
    body = tools.chat_body("hi", "Hello there", "more")
    assert (await second.client.chat(body, conversation_id="c")).headers["x-kvduplex-plan"] == "pull"
    assert (await first.client.chat(body, conversation_id="c")).headers["x-kvduplex-plan"] == "recompute"


async def refused(router: Any, body: Any) -> None:
    """A turn that the prefill engine refuses."""
    good = router.p.handler
    router.p.handler = lambda request: request.reply({"error": {"message": "no", "type": "Bad Request"}}, 400)
    assert (await router.client.chat(body, conversation_id="c", stop=5)).status == 400
    router.p.handler = good


async def test_what_a_refused_turn_had_taken_another_router_may_use(
    pair: Any, server: Any, leases: Any, tools: Any
) -> None:
    first, second = pair
    await first.client.chat(conversation_id="c")
    await stored(server, tools, 1)
    body = tools.chat_body("hi", "Hello there", "more")
    await refused(second, body)
    await stored(server, tools, 1)
    end = time.monotonic() + 2 * TTL_S
    while time.monotonic() < end:
        assert leases.held == 1, "renewed as before"
        await asyncio.sleep(0.05)
    assert (await first.client.chat(body, conversation_id="c")).headers["x-kvduplex-plan"] == "pull"
    offered = claims(first)
    assert len(offered) == 2
    assert offered[0] == offered[1], "of the refused turn and of the corrected one"


async def test_what_is_put_back_keeps_its_age(server: Any, make_cluster: Any, tools: Any) -> None:
    router = await make_cluster(reuse="stock", state={"url": server.url, "retry_s": 0.05})
    await tools.eventually(lambda: state_of(router))
    await router.client.chat(conversation_id="c")
    await stored(server, tools, 1)
    key = server.command("KEYS", "kvduplex:{default}:turn:*").split(b"\r\n")[2].decode()
    server.command("PEXPIRE", key, "60000")  # as if it were seven of its eight minutes old
    await refused(router, tools.chat_body("hi", "Hello there", "more"))
    await stored(server, tools, 1)
    assert 30_000 < int(server.command("PTTL", key)[1:]) <= 60_000


async def test_a_newer_reference_on_the_server_stays(pair: Any, server: Any, leases: Any, tools: Any) -> None:
    first, second = pair
    await first.client.chat(conversation_id="c")
    await stored(server, tools, 1)
    body = tools.chat_body("hi", "Hello there", "more")
    good, refuse = first.p.handler, asyncio.Event()

    async def late(request: Any) -> None:
        await refuse.wait()
        await request.reply({"error": {"message": "no", "type": "Bad Request"}}, 400)

    first.p.handler = late
    waiting = asyncio.create_task(first.client.chat(body, conversation_id="c"))
    await tools.eventually(lambda: len(first.p.requests) == 2, "it has taken the reference")
    first.p.handler = good
    await second.client.chat(body, conversation_id="c")
    await stored(server, tools, 1)
    newer = named(first)[-1]
    refuse.set()
    assert (await waiting).status == 400
    await tools.eventually(lambda: leases.held == 1, "the older one's lease is given back")
    assert leases.alive(newer)
    assert server.command("ZCARD", "kvduplex:{default}:renew") == b":1\r\n"
    await second.client.chat(body, conversation_id="c")
    assert claims(first)[-1] == newer


async def test_tenants_and_namespaces_do_not_share(server: Any, pair: Any, tools: Any) -> None:
    other = await pair[0].another(state={"url": server.url, "namespace": "other"})
    await tools.eventually(lambda: state_of(other))
    await pair[0].client.chat(conversation_id="c")
    await stored(server, tools, 1)
    answer = await other.client.chat(tools.chat_body("hi", "Hello there", "more"), conversation_id="c")
    assert answer.headers["x-kvduplex-plan"] == "recompute"


async def test_only_metadata_with_a_time_to_live_is_stored(pair: Any, server: Any, tools: Any) -> None:
    await pair[0].client.chat(tools.chat_body("a very secret prompt"), conversation_id="very-secret-id")
    await stored(server, tools, 1)
    key = server.command("KEYS", "kvduplex:{default}:turn:*").split(b"\r\n")[2].decode()
    assert 0 < int(server.command("PTTL", key)[1:]) <= 480_000
    everything = key.encode() + server.command("GET", key)
    assert named(pair[0])[0].encode() in everything
    assert b"secret" not in everything
    assert b"Hello" not in everything


async def test_another_router_renews_what_one_that_ended_had_made(
    pair: Any, server: Any, leases: Any, tools: Any
) -> None:
    first, second = pair
    await first.client.chat(conversation_id="c")
    await stored(server, tools, 1)
    await first.stop_router()
    await tools.eventually(lambda: second.metric("shared_leases") == 1)
    lease = named(second)[0]
    end = time.monotonic() + 2 * TTL_S
    while time.monotonic() < end:  # far beyond the life of a lease that nobody renews
        assert leases.held == 1
        await asyncio.sleep(0.05)
    answer = await second.client.chat(tools.chat_body("hi", "Hello there", "more"), conversation_id="c")
    assert answer.headers["x-kvduplex-plan"] == "pull"
    assert claims(second) == [lease]


async def test_a_lease_that_its_engine_dropped_is_known_to_all(pair: Any, server: Any, leases: Any, tools: Any) -> None:
    first, second = pair
    await first.client.chat(conversation_id="c")
    await stored(server, tools, 1)
    leases.table.release(named(first))
    await tools.eventually(lambda: server.command("ZCARD", "kvduplex:{default}:renew") == b":0\r\n", "it is noticed")
    answer = await second.client.chat(tools.chat_body("hi", "Hello there", "more"), conversation_id="c")
    assert answer.headers["x-kvduplex-plan"] == "recompute"
    assert second.metric("reuse_refused_total", reason="lease_lost") == 1


async def test_a_taken_lease_is_no_longer_renewed_and_a_superseded_one_given_back(
    pair: Any, server: Any, leases: Any, tools: Any
) -> None:
    first, second = pair
    await first.client.chat(conversation_id="c")
    await stored(server, tools, 1)
    await second.client.chat(tools.chat_body("hi", "Hello there", "more"), conversation_id="c")
    await stored(server, tools, 1)
    assert server.command("ZCARD", "kvduplex:{default}:renew") == b":1\r\n"
    await tools.eventually(lambda: leases.held == 1, "the first lease lapses, for nobody renews it")


async def test_without_the_server_turns_go_on_with_what_each_router_knows(
    pair: Any, server: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvduplex.router.state")
    first, _ = pair
    server.stop()
    history = ["hi"]
    plans = []
    for turn in range(4):
        answer = await first.client.chat(tools.chat_body(*history), conversation_id="c")
        assert answer.status == 200
        plans.append(answer.headers["x-kvduplex-plan"])
        history += ["Hello there", f"more {turn}"]
    assert plans[-2:] == ["pull", "pull"]
    assert first.metric("state_up") == 0
    said = [record.message for record in caplog.records if "cannot be used" in record.message]
    assert len(said) <= 2, "one line a router"
    server.start()
    await tools.eventually(lambda: all(map(state_of, pair)), "both come back")
    assert "is back after" in caplog.text
    await first.client.chat(conversation_id="again")
    await stored(server, tools, 1)


async def test_a_server_that_hangs_costs_a_deadline_and_mixes_up_nothing(pair: Any, server: Any, tools: Any) -> None:
    first, second = pair
    for name in ("a", "b"):
        await first.client.chat(conversation_id=name)
    await stored(server, tools, 2)
    server.freeze()
    answers = await asyncio.gather(*(first.client.chat(conversation_id=n) for n in ("a", "b", "x", "y")))
    assert [answer.status for answer in answers] == [200] * 4
    await tools.eventually(lambda: not state_of(first), "it is given up")
    server.thaw()
    await tools.eventually(lambda: state_of(first) and state_of(second), "it is back")
    for name in ("a", "b", "x", "y"):
        body = tools.chat_body("hi", "Hello there", "more")
        assert (await second.client.chat(body, conversation_id=name)).status == 200
    offered = claims(first)
    assert len(offered) == len(set(offered))


async def test_a_wiped_server_costs_one_recomputation(pair: Any, server: Any, tools: Any) -> None:
    first, second = pair
    await first.client.chat(conversation_id="c")
    await stored(server, tools, 1)
    server.command("FLUSHALL")
    server.command("SCRIPT", "FLUSH")
    body = tools.chat_body("hi", "Hello there", "more")
    assert (await second.client.chat(body, conversation_id="c")).headers["x-kvduplex-plan"] == "recompute"
    await stored(server, tools, 1)
    assert (await first.client.chat(body, conversation_id="c")).headers["x-kvduplex-plan"] == "pull"


async def test_garbage_in_the_server_costs_a_recomputation(pair: Any, server: Any, tools: Any) -> None:
    await pair[0].client.chat(conversation_id="c")
    await stored(server, tools, 1)
    key = server.command("KEYS", "kvduplex:{default}:turn:*").split(b"\r\n")[2].decode()
    for value in ("garbage", '"\\n"', '"\\n1\\x99garbage"', '"9|x|y\\n1"', '"x|y\\n1"'):
        server.command("SET", key, value, "PX", "9999")
        assert (await pair[1].client.chat(conversation_id="c")).status == 200
        await tools.eventually(lambda: b"decode0" in server.command("GET", key), "it is overwritten")
        server.command("SET", "kvduplex:{default}:turn:" + "0" * 32, value, "PX", "9999")
        server.command("ZADD", "kvduplex:{default}:renew", "1", "garbage")
    await tools.eventually(lambda: b"garbage" not in server.command("ZRANGE", "kvduplex:{default}:renew", "0", "-1"))
    assert pair[0].metric("state_failures") == pair[1].metric("state_failures") == 0


async def test_a_server_without_rights_or_room_is_treated_as_gone(server: Any, make_cluster: Any, tools: Any) -> None:
    server.command("ACL", "SETUSER", "default", "-set")
    router = await make_cluster(reuse="stock", state={"url": server.url, "retry_s": 0.05})
    await router.client.chat(conversation_id="c")
    answer = await router.client.chat(tools.chat_body("hi", "Hello there", "more"), conversation_id="c")
    assert answer.headers["x-kvduplex-plan"] == "pull"
    assert router.metric("state_up") == 0
    server.command("ACL", "SETUSER", "default", "+set")
    await tools.eventually(lambda: state_of(router))


async def test_the_password_comes_from_the_environment(
    server: Any, make_cluster: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.command(
        "ACL",
        "SETUSER",
        "router",
        "on",
        ">sesame-open",
        "~kvduplex:*",
        "-@all",
        "+@read",
        "+@write",
        "+@keyspace",
        "+@scripting",
        "+@connection",
        "+time",
        "-@dangerous",
    )
    monkeypatch.setenv("STATE_PASSWORD", "sesame-open")
    url = server.url.replace("//", "//router@")
    router = await make_cluster(state={"url": url, "password_env": "STATE_PASSWORD", "retry_s": 0.05})
    await tools.eventually(lambda: state_of(router), "it is let in")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_over_tls_the_servers_certificate_is_checked(
    tls_server: Any, make_cluster: Any, tools: Any, tmp_path: Any, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It names 127.0.0.1 and nothing else."""
    state = {
        "url": f"valkeys://{host}:{tls_server.tls_port}/0", "ca_file": str(tmp_path / "cert.pem"),
        "retry_s": 0.05, "timeout_s": 1.0,
    }  # fmt: skip
    router = await make_cluster(state=state)
    if host == "127.0.0.1":
        await tools.eventually(lambda: state_of(router))
        await router.client.chat(conversation_id="c")
        await stored(tls_server, tools, 1)
    else:
        await tools.eventually(lambda: "certificate" in caplog.text, "it is refused")
        assert (await router.client.chat(conversation_id="c")).status == 200
        assert not state_of(router)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"url": "http://h:1"}, "is not a state URL; write valkey://HOST:PORT/DB"),
        ({"url": "valkey://:secret@h:1"}, "state.url: the URL holds a password; put it into an environment variable"),
        ({"url": "valkey://h:99999"}, "is not a state URL"),
        ({"url": "valkey://h:1/x"}, "is not a state URL"),
        ({"url": "unix:///s?password=secret"}, "the URL holds a password"),
        ({"password_env": "X"}, "password_env is given without url"),
        ({"url": "valkey://h:1", "namespace": "a b"}, "state.namespace"),
        ({"urls": "valkey://h:1"}, "unknown key; allowed here: ca_file, namespace, password_env"),
    ],
)
def test_what_is_wrong_with_the_configuration_is_said(state: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(None, engines=("http://e:1",), state=state)
    assert told in str(caught.value)
    assert "secret@" not in str(caught.value)


def test_the_flag_leaves_the_files_other_keys(tmp_path: Any) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("engines: [http://e:1]\nstate: {namespace: blue, timeout_s: 0.2}\n")
    config = build_config(file, state_url="redis://cache:6379/2")
    assert (config.state.url, config.state.namespace) == ("valkey://cache:6379/2", "blue")
