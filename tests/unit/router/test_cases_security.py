"""Rows X1-X4 and G1-G2: what clients and engines may not do, keys, and what is never written anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvduplex_router.config import Reuse, build_config
from kvduplex_router.errors import ConfigError

EVIL = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80, "remote_block_ids": [[1]]}
CHAT = "/v1/chat/completions"

START = b'{"model":"m","messages":[{"role":"user","content":"hi"}],'
INJECTIONS: dict[str, bytes] = {
    "top": START + b'"kv_transfer_params":EVIL}',
    "twice": b'{"kv_transfer_params":EVIL,' + START[1:] + b'"kv_transfer_params":EVIL}',
    "escaped": START + rb'"kv\u005ftransfer\u005fparams":EVIL}',
    "xargs": START + b'"vllm_xargs":{"kv_transfer_params":EVIL,"a":1}}',
    "xargs escaped": START + rb'"vllm_xargs":{"kv\u005ftransfer_params":EVIL}}',
    "encoder": START + b'"ec_transfer_params":EVIL}',
    "whole": START + b'"n":2,"kv_transfer_params":EVIL}',
}


@pytest.mark.parametrize("name", list(INJECTIONS))
async def test_x1_transfer_parameters_of_a_client_reach_no_engine(make_cluster: Any, tools: Any, name: str) -> None:
    cluster = await make_cluster()
    raw = INJECTIONS[name].replace(b"EVIL", tools.dumps(EVIL))
    answer = await cluster.client(CHAT, raw, {"x-kv-transfer-params": "evil", "x-data-parallel-rank": "3"})
    assert answer.status == 200
    for request in [*cluster.p.requests, *cluster.d.requests]:
        assert b"169.254" not in request.body
        assert "x-kv-transfer-params" not in request.headers
        assert "x-data-parallel-rank" not in request.headers
    assert cluster.d.requests


async def test_x1_other_endpoints_are_cleaned_too(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()
    for path in ("/v1/embeddings", "/tokenize", "/v1/chat/completions/batch", "/v1/chat/completions/render"):
        raw = b'{"model":"m","input":"x","kv_transfer_params":EVIL}'.replace(b"EVIL", tools.dumps(EVIL))
        assert (await cluster.client(path, raw)).status == 200
    assert cluster.d.requests
    assert not any(b"169.254" in request.body for request in cluster.d.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_x1_a_client_sees_no_transfer_parameters_of_any_kind(make_cluster: Any, stream: bool) -> None:
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        secret = {"ec_transfer_params": {"peer": "10.1.2.3"}, "kv_transfer_params": cluster.d.params()}
        choice = {"index": 0, "finish_reason": "stop", "delta" if stream else "message": {"content": "x"}}
        if not stream:
            await request.reply({"choices": [choice], **secret})
            return
        await request.begin_stream()
        await request.event({"choices": [choice], **secret})
        await request.event(b"[DONE]")
        await request.end_stream()

    cluster.d.handler = answer
    got = await cluster.client.chat(stream=stream)
    assert got.status == 200
    assert b"transfer_params" not in got.body
    assert b'"x"' in got.body


@pytest.mark.parametrize("host", ["10.9.9.9", "evil.example", 7, ["127.0.0.1"]])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_x1_an_engine_that_names_an_unknown_host_is_not_believed(
    make_cluster: Any, tools: Any, role: str, host: Any, caplog: Any
) -> None:
    cluster = await make_cluster()
    engine = cluster.p if role == "prefill" else cluster.d
    params = engine.params
    engine.params = lambda **changes: {**params(**changes), "remote_host": host}
    answer = await cluster.client.chat(conversation_id="c")
    assert "kv_hosts" in caplog.text
    if role == "prefill":
        assert answer.status == 502
        assert cluster.d.requests == []
    else:
        assert answer.status == 200
        await cluster.client.chat(tools.chat_body("hi", "Hello there", "more"), conversation_id="c")
        assert "remote_host" not in cluster.p.bodies[1]["kv_transfer_params"]


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1", "::", "", None, "127.0.0.9"])
async def test_g2_loopback_and_wildcard_hosts_become_the_registered_address(make_cluster: Any, host: Any) -> None:
    cluster = await make_cluster(entries=lambda _engine: {"kv_hosts": ["10.0.0.7"]})
    params = cluster.p.params

    def named(**changes: Any) -> dict[str, Any]:
        found = {**params(**changes), "remote_host": host}
        if host is None:
            del found["remote_host"]
        return found

    cluster.p.params = named
    assert (await cluster.client.chat()).status == 200
    assert cluster.d.bodies[0]["kv_transfer_params"]["remote_host"] == "10.0.0.7"


async def test_g2_a_listed_address_is_kept(make_cluster: Any) -> None:
    cluster = await make_cluster(entries=lambda _engine: {"kv_hosts": ["10.0.0.7", "efa.example"]})
    params = cluster.p.params
    cluster.p.params = lambda **changes: {**params(**changes), "remote_host": "efa.example"}
    assert (await cluster.client.chat()).status == 200
    assert cluster.d.bodies[0]["kv_transfer_params"]["remote_host"] == "efa.example"


P, D = "http://p:8100", "http://d:8200"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "prefill: no engine given"),
        ({"prefill": [P]}, "decode: prefill engines need at least one decode engine"),
        ({"decode": [D]}, "prefill: decode engines need at least one prefill engine"),
        ({"prefill": [P], "decode": [D], "engines": ["http://e:1"]}, "engines: give either"),
        ({"prefill": [P, P], "decode": [D]}, "'http://p:8100' is given 2 times"),
        ({"prefill": [P], "decode": [P]}, "'http://p:8100' is given 2 times"),
        ({"prefill": ["p:8100"], "decode": [D]}, "prefill.0.url: 'p:8100' is not a URL"),
        ({"prefill": ["ftp://p:1"], "decode": [D]}, "prefill.0.url: 'ftp://p:1' is not a URL"),
        ({"prefill": ["http://p:0"], "decode": [D]}, "port 0"),
        ({"prefill": ["http://p:99999"], "decode": [D]}, "port outside 1 to 65535"),
        ({"prefill": ["http://fe80::1:8100"], "decode": [D]}, "prefill.0.url"),
        ({"prefill": ["http://p:1/v1"], "decode": [D]}, "more than scheme, host and port"),
        ({"prefill": ["http://user:secret@p:1"], "decode": [D]}, "more than scheme, host and port"),
        ({"prefill": [P], "decode": [D + "#x=y"]}, "#lease=HOST:PORT"),
        ({"prefill": [P], "decode": [D + "#lease=7000"]}, "decode.0.lease: '7000'"),
        ({"prefill": [P], "decode": [D], "listen": "8000"}, "listen: '8000'"),
        ({"prefill": [P], "decode": [D], "listen": "0.0.0.0:0"}, "listen: '0.0.0.0:0' needs a port"),
        ({"prefill": [P], "decode": [D], "listen": "::1:8000"}, "IPv6 hosts in brackets"),
        ({"prefill": [P], "decode": [D], "reuse": "leased"}, "no lease endpoint"),
        ({"prefill": [P], "decode": [D], "reuse": "maybe"}, "reuse: Input should be 'auto'"),
        ({"prefill": [P], "decode": [D], "workers": 0}, "workers"),
        ({"prefill": [P], "decode": [D], "workers": True}, "workers: a number is expected here, got yes"),
        ({"prefill": ["http://:secret@p:1"], "decode": [D]}, "more than scheme, host and port"),
        ({"prefill": ["http://a b:1"], "decode": [D]}, "'a b' is neither a host name nor an IP address"),
        ({"prefill": ["http://*:1"], "decode": [D]}, "'*' is neither a host name nor an IP address"),
        ({"prefill": ["http://[::1"], "decode": [D]}, "prefill.0.url: 'http://[::1' is not a URL"),
        ({"prefill": ["http://p"], "decode": ["http://P:80"]}, "'http://p:80' is given 2 times"),
        ({"prefill": [{"url": P, "name": "a/b"}], "decode": [D]}, "prefill.0.name"),
        ({"prefill": [{"url": P, "kv_hosts": [""]}], "decode": [D]}, "prefill.0.kv_hosts"),
        ({"prefill": [P], "decode": [D], "tls": {"key_file": "k.pem"}}, "tls: key_file 'k.pem' is given without"),
        ({"prefill": [P], "decode": [D], "otlp_endpoint": "http://:secret@c:1"}, "telemetry.otlp_endpoint"),
        ({"prefill": [P], "decode": [D], "otlp_endpoint": "http://c:99999"}, "telemetry.otlp_endpoint"),
    ],
)
def test_g1_bad_set_ups_are_refused_in_one_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_config(None, **flags)
    text = str(refused.value)
    assert message in text
    assert "\n" not in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("prefil: []\n", ":1: prefil: unknown key; allowed here: admin"),
        (f"prefill: [{P}]\ndecode:\n  - url: {D}\n    leese: x\n", ":4: decode.0.leese: unknown key"),
        (f"prefill: [{P}]\ndecode: [{D}]\ntimeouts:\n  idle_s: 0\n", ":4: timeouts.idle_s: Input should be greater"),
        (f"prefill: [{P}]\nprefill: [{D}]\n", ":2: prefill: given twice"),
        ("- a\n", ":1: expected a mapping"),
        ("a: [\n", "not valid YAML"),
        (f"prefill: [{P}]\ndecode: [{D}]\nconversations: {{reference_ttl_s: 480}}\n", "must be below"),
        (f"engines: [{P}]\nlimits: {{queued: yes}}\n", ":2: limits.queued: a number is expected here, got yes"),
        ("a: &a [*a]\n", "nested without end"),
        ("prefill: " + "[" * 5000, "nested without end"),
    ],
)
def test_g1_errors_in_files_name_file_line_and_key(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as refused:
        build_config(file)
    assert message in str(refused.value)
    assert str(refused.value).startswith(str(file))


def test_g1_good_set_ups(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"prefill: ['http://[::1]:8100']\ndecode: ['{D}#lease=[fe80::1]:7000']\nlisten: '[::]:80'\n")
    config = build_config(file, listen="127.0.0.1:9")
    assert config.listen == "127.0.0.1:9"
    assert config.decode[0].lease == "[fe80::1]:7000"
    assert config.prefill[0].name == "[::1]:8100"


def test_g1_a_bare_off_is_a_word(tmp_path: Path) -> None:
    """YAML reads it as false, and documents write it without quotes."""
    file = tmp_path / "router.yaml"
    file.write_text(f"engines: [{P}]\nreuse: off\n")
    assert build_config(file).reuse is Reuse.OFF


def test_g1_a_flag_beside_a_wrong_section_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"engines: [{P}]\nrouting: [prefix]\n")
    with pytest.raises(ConfigError, match="routing: Input should be"):
        build_config(file, policy="prefix")
    file.write_text(f"engines: [{P}]\nrouting:\n  receipts: -1\n")
    with pytest.raises(ConfigError, match=r":3: routing\.receipts: Input should be greater"):
        build_config(file, policy="prefix")


def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"second-key").hexdigest()
    file.write_text(
        f"- {{key: first-key, tenant: a}}\n- {{sha256: {digest}, tenant: b}}\n"
        "- {key: third-key, tenant: a, requests_per_minute: 2}\n"
    )
    return file


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong"),
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        bearer("first-key x"),
    ],
)
async def test_x3_without_a_known_key_nothing_is_served(
    make_cluster: Any, tmp_path: Path, headers: dict[str, str]
) -> None:
    cluster = await make_cluster(auth={"keys_file": keys_file(tmp_path)})
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/v1/nothing"):
        answer = await cluster.client(path, {"model": "m"}, headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"]["type"] == "authentication_error"
    assert (await cluster.client("/v1/models", None, headers)).status == 401
    assert (await cluster.client("/health", None, headers)).status == 200
    assert cluster.p.requests == cluster.d.requests == []
    assert cluster.metric("rejections_total", reason="unauthenticated") == 7


@pytest.mark.parametrize(
    "headers",
    [
        bearer("first-key"),
        {"authorization": "bearer second-key"},
        {"authorization": "BEARER  first-key "},
        {"x-api-key": "second-key"},
    ],
)
async def test_x3_known_keys_are_let_in_and_go_no_further(
    make_cluster: Any, tmp_path: Path, headers: dict[str, str]
) -> None:
    cluster = await make_cluster(auth={"keys_file": keys_file(tmp_path)})
    assert (await cluster.client.chat(None, headers)).status == 200
    for request in [*cluster.p.requests, *cluster.d.requests]:
        assert "authorization" not in request.headers
        assert "x-api-key" not in request.headers


async def test_x3_engines_get_their_own_key_on_hops_and_probes(make_cluster: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENGINE_KEY", "engine-secret")
    cluster = await make_cluster(auth={"engine_key_env": "ENGINE_KEY"})
    await cluster.client.chat(None, bearer("whatever"))
    await cluster.client("/v1/embeddings", {"input": "x"})
    await cluster.client("/v1/models")
    for request in [*cluster.p.requests, *cluster.d.requests]:
        assert request.headers["authorization"] == "Bearer engine-secret"
    assert set(cluster.d.probe_keys) == {"Bearer engine-secret"}


async def test_x3_the_clients_key_is_forwarded_when_configured(make_cluster: Any) -> None:
    cluster = await make_cluster(auth={"forward_authorization": True})
    await cluster.client.chat(None, bearer("theirs"))
    assert (
        cluster.p.requests[0].headers["authorization"]
        == cluster.d.requests[0].headers["authorization"]
        == "Bearer theirs"
    )


async def test_x3_traces_go_on_and_hop_by_hop_headers_do_not(make_cluster: Any) -> None:
    cluster = await make_cluster()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    sent = {"traceparent": trace, "tracestate": "a=b", "te": "trailers", "proxy-authorization": "x", "cookie": "c=1",
            "x-forwarded-for": "1.2.3.4", "x-request-id": "theirs"}  # fmt: skip
    await cluster.client.chat(None, sent)
    for request in [*cluster.p.requests, *cluster.d.requests]:
        assert request.headers["traceparent"] == trace
        assert request.headers["tracestate"] == "a=b"
        assert not {"te", "proxy-authorization", "cookie", "x-forwarded-for"} & set(request.headers)
        assert request.headers["x-request-id"] != "theirs"


async def test_r4_two_tenants_with_one_id_do_not_share(make_cluster: Any, tools: Any, tmp_path: Path) -> None:
    cluster = await make_cluster(auth={"keys_file": keys_file(tmp_path)})
    await cluster.client.chat({"conversation_id": "c"}, bearer("first-key"))
    second = {**tools.chat_body("hi", "Hello there", "more"), "conversation_id": "c"}
    assert (await cluster.client.chat(second, bearer("second-key"))).headers["x-kvduplex-plan"] == "recompute"
    assert (await cluster.client.chat(second, bearer("third-key"))).headers["x-kvduplex-plan"] == "pull"


async def test_a_keys_rate_is_its_own(make_cluster: Any, tmp_path: Path) -> None:
    now = [0.0]
    cluster = await make_cluster(auth={"keys_file": keys_file(tmp_path)}, clock=lambda: now[0])
    statuses = [(await cluster.client.chat(None, bearer("third-key"))).status for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert (await cluster.client.chat(None, bearer("first-key"))).status == 200
    refused = await cluster.client.chat(None, bearer("third-key"))
    assert 0 < int(refused.headers["retry-after"]) <= 31
    now[0] += 31
    assert (await cluster.client.chat(None, bearer("third-key"))).status == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- {key: canary-key, sha256: x}\n", "entry 1"),
        ("- {keyy: canary-key}\n", "entry 1"),
        ("- {key: canary}\n", "at least 8"),
        ("canary-key\n", "must be a list"),
        ("- [canary-key\n", "not valid YAML"),
        ("", "must be a list"),
        ("- {key: canary-key}\n- {key: canary-key, tenant: b}\n", "keys 1 and 2 are the same"),
        ("- {key: canary-key, requests_per_minute: .inf}\n", "requests_per_minute"),
        ("- {key: canary-key, requests_per_minute: yes}\n", "requests_per_minute"),
    ],
)
async def test_x3_a_bad_keys_file_is_refused_without_showing_a_key(
    make_cluster: Any, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        await make_cluster(auth={"keys_file": file})
    assert message in str(refused.value)
    assert "canary" not in str(refused.value)


async def test_x3_a_missing_variable_is_named(make_cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"auth.keys_env: environment variable NO_SUCH_KEYS is empty or not set"):
        await make_cluster(auth={"keys_env": "NO_SUCH_KEYS"})


async def test_x3_a_variable_of_commas_lets_nobody_in(make_cluster: Any, monkeypatch: Any) -> None:
    """No key at all would mean that none is asked for."""
    monkeypatch.setenv("ROUTER_KEYS", " , ,")
    with pytest.raises(ConfigError, match=r"ROUTER_KEYS holds commas and no key"):
        await make_cluster(auth={"keys_env": "ROUTER_KEYS"})


async def test_x3_admin_paths_need_the_admin_key(make_cluster: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ADMIN_KEY", "admin-secret")
    cluster = await make_cluster(admin={"key_env": "ADMIN_KEY"}, decode=2)
    for path in ("/admin/engines", "/metrics", "/openapi.json"):
        assert (await cluster.client(path)).status == 401
        assert (await cluster.client(path, None, bearer("wrong"))).status == 401
        assert (await cluster.client(path, None, bearer("admin-secret"))).status == 200
    assert (await cluster.client("/admin/engines/decode0/drain", {}, bearer("wrong"))).status == 401
    drained = await cluster.client("/admin/engines/decode0/drain", {}, bearer("admin-secret"))
    assert drained.json["draining"] is True
    for _ in range(4):
        await cluster.client.chat()
    assert cluster.decode[0].requests == []
    await cluster.client("/admin/engines/decode0/resume", {}, bearer("admin-secret"))
    await cluster.client.chat()
    assert cluster.decode[0].requests
    assert (await cluster.client("/admin/engines/none/drain", {}, bearer("admin-secret"))).status == 404


async def test_x3_without_an_admin_key_there_is_no_admin(make_cluster: Any) -> None:
    cluster = await make_cluster()
    assert (await cluster.client("/admin/engines")).status == 404
    assert (await cluster.client("/metrics")).status == 200


async def test_x4_a_canary_is_written_nowhere(make_cluster: Any, caplog: Any, monkeypatch: Any) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("KEYS", "canary-api-key")
    cluster = await make_cluster(auth={"keys_env": "KEYS"}, retries=0)
    good = cluster.p.handler
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "canary-prompt"}],
        "tools": [{"type": "function", "function": {"name": "canary-tool"}}],
        "conversation_id": "canary-id", "user": "canary-user",
    }  # fmt: skip
    headers = bearer("canary-api-key")

    async def echo(request: Any) -> None:
        error = {"message": f"bad: {request.body.decode()}", "type": "BadRequestError", "code": 400}
        await request.reply({"error": error}, 400)

    async def crash(request: Any) -> None:
        await request.reply(b"Traceback: canary-prompt", 500)

    statuses = []
    for handler in (good, echo, crash):
        cluster.p.handler = handler
        statuses.append((await cluster.client.chat(body, headers)).status)
    assert statuses == [200, 400, 502]
    assert "canary" not in caplog.text
    assert b"canary" not in (await cluster.client("/metrics")).body


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/collective_rpc", "/reset_prefix_cache", "/server_info", "/v1/load_lora_adapter", "/v1//sleep",
     "/v1/unload_lora_adapter", "/abort_requests", "/invocations", "/v1/../sleep", "/update_weights", "/shutdown"],
)  # fmt: skip
async def test_what_changes_an_engine_is_not_passed_on(make_cluster: Any, path: str) -> None:
    cluster = await make_cluster()
    answer = await cluster.client(path, {})
    assert answer.status == 404
    assert answer.json["error"]["type"] == "not_found_error"
    assert cluster.d.requests == []


async def test_other_requests_are_passed_on_as_they_are(make_cluster: Any) -> None:
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        await request.reply({"target": request.target, "method": request.method}, 201)

    cluster.d.handler = answer
    got = await cluster.client("/v1/embeddings?x=1", b'{"model":"m", "input":"a"}')
    assert got.status == 201
    assert got.json == {"target": "/v1/embeddings?x=1", "method": "POST"}
    assert cluster.d.requests[0].json == {"model": "m", "input": "a"}
    form = b"--b\r\n\r\nkv_transfer_params\r\n--b--"
    await cluster.client("/v1/audio/transcriptions", form, {"content-type": "multipart/form-data; boundary=b"})
    assert cluster.d.requests[1].body == form
    assert (await cluster.client("/v1/responses/resp_1", method="GET")).json["target"] == "/v1/responses/resp_1"
    assert cluster.idle()


async def test_an_engines_redirect_is_no_answer(make_cluster: Any) -> None:
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        await request.reply(b"", 307, f"location: http://127.0.0.1:{cluster.d.port}{CHAT}\r\n")

    cluster.d.handler = answer
    got = await cluster.client(f"{CHAT}/", {"model": "m"})
    assert (got.status, got.json["error"]["type"]) == (404, "not_found_error")
    assert str(cluster.d.port) not in got.body.decode()
    assert cluster.idle()


async def test_unknown_paths_and_methods_get_openai_errors(make_cluster: Any) -> None:
    cluster = await make_cluster()
    for path, method, status in (("/nothing", "GET", 404), (CHAT, "GET", 405), ("/health", "POST", 405)):
        answer = await cluster.client(path, None, method=method)
        assert answer.status == status
        assert answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/ready", 200), ("/v1/models", 405), (CHAT, 405), ("/nothing", 404)]
)
async def test_a_request_for_a_head_alone_gets_one_and_the_connection_goes_on(
    make_cluster: Any, path: str, status: int
) -> None:
    cluster = await make_cluster()
    reader, writer = await cluster.client.send(path, None, method="HEAD")
    writer.write(b"GET /health HTTP/1.1\r\nhost: router\r\n\r\n")
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def read_all(cluster: Any, *parts: bytes) -> bytes:
    """What comes back until the router closes the connection."""
    reader, writer = await cluster.client.open()
    received = b""
    with contextlib.suppress(OSError):
        for part in parts:
            writer.write(part)
            await writer.drain()
    async with asyncio.timeout(10):
        with contextlib.suppress(OSError):
            while part := await reader.read(65536):
                received += part
    writer.close()
    return received


async def test_an_endless_request_head_is_cut_off(make_cluster: Any) -> None:
    cluster = await make_cluster(timeouts={"header_s": 60})
    for line in (b"a" * 65536, b"x-a: " + b"a" * 65536 + b"\r\n"):
        assert b" 200 " not in await read_all(cluster, b"GET /health HTTP/1.1\r\n", *[line] * 200, b"\r\n\r\n")
    assert (await cluster.client.chat(None, {"x-long": "a" * 60_000})).status == 200


async def test_what_is_no_request_gets_an_openai_error(make_cluster: Any) -> None:
    cluster = await make_cluster()
    head, _, body = (await read_all(cluster, b"\x16\x03\x01\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert orjson.loads(body)["error"]["type"] == "invalid_request_error"


async def whole_answer(reader: asyncio.StreamReader) -> bytes:
    """The head of an answer, read with its body."""
    async with asyncio.timeout(10):
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        return answer


async def test_bodies_do_not_count_as_heads(make_cluster: Any) -> None:
    cluster = await make_cluster()
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 120_000}]})
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.client.port)
    try:
        for _ in range(8):
            writer.write(head % len(body) + body)
            assert (await whole_answer(reader)).startswith(b"HTTP/1.1 200 ")
    finally:
        writer.close()


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
async def test_an_offer_to_upgrade_is_declined_and_the_body_read(make_cluster: Any, offer: str) -> None:
    """Java's HttpClient offers HTTP/2 with every request over plain HTTP."""
    cluster = await make_cluster()
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": offer, "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    lines = [f"{name}: {value}" for name, value in {**headers, "content-length": len(body)}.items()]
    head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "host: r", "content-type: application/json", *lines])
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.client.port)
    try:
        for _ in range(3):  # on one connection: every request may make the offer again
            writer.write(head.encode() + b"\r\n\r\n" + body)
            assert (await whole_answer(reader)).startswith(b"HTTP/1.1 200 ")
    finally:
        writer.close()
    assert len(cluster.d.requests) >= 3
    assert all("upgrade" not in name for request in cluster.d.requests for name in request.headers)
