"""Bodies are JSON and say so, as vLLM asks: what a web page may send to anybody is nothing here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvduplex_router.requests.apis import ALL

REFUSED = [
    "text/plain",
    "text/plain; charset=utf-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b",
    "application/merge-patch+json",
    "application/jsonl",
    "",
]
TAKEN = ["application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"]


@pytest.mark.parametrize("path", [kind.path for kind in ALL])
async def test_generating_paths_read_json_alone(make_cluster: Any, tools: Any, path: str) -> None:
    cluster = await make_cluster()
    body = {**tools.chat_body(), "prompt": "hi", "input": "hi", "max_tokens": 4}
    for content_type in REFUSED:
        answer = await cluster.client(path, body, {"content-type": content_type})
        assert answer.status == 400, content_type
        assert "send 'Content-Type: application/json'" in answer.json["error"]["message"]
    assert await _without_a_type(cluster, tools, path, body) == 400
    assert not cluster.p.requests
    assert not cluster.d.requests
    for content_type in TAKEN:
        assert (await cluster.client(path, body, {"content-type": content_type})).status == 200, content_type
    assert cluster.idle()


async def _without_a_type(cluster: Any, tools: Any, path: str, body: Any) -> int:
    data = json.dumps(body).encode()
    reader, writer = await cluster.client.open()
    writer.write(b"POST %b HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
    answer = await tools.read_answer(reader)
    writer.close()
    return int(answer.status)


async def test_what_is_passed_on_is_json_or_a_form_with_files(make_cluster: Any, tools: Any) -> None:
    cluster = await make_cluster()

    async def answer(request: Any) -> None:
        await request.reply({"ok": True})

    cluster.d.handler = answer
    form = "multipart/form-data; boundary=b"
    for content_type in set(REFUSED) - {form}:
        answer_ = await cluster.client("/v1/embeddings", {"input": "a"}, {"content-type": content_type})
        assert answer_.status == 400, content_type
    assert await _without_a_type(cluster, tools, "/v1/embeddings", {"input": "a"}) == 400
    assert not cluster.d.requests
    for content_type in (*TAKEN, form):
        assert (await cluster.client("/v1/embeddings", b"{}", {"content-type": content_type})).status == 200
    cancelled = await cluster.client("/v1/responses/r/cancel", b"", {"content-type": "text/plain"})
    assert cancelled.status == 200  # no body, so none of a wrong type


async def test_operators_bodies_are_json_too(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY", "admin-secret")
    cluster = await make_cluster(admin={"key_env": "ADMIN_KEY"})
    key = {"authorization": "Bearer admin-secret"}
    entry = {"url": "http://127.0.0.1:1", "name": "new", "role": "decode"}
    for content_type in REFUSED:
        answer = await cluster.client("/admin/engines", entry, {**key, "content-type": content_type})
        assert answer.status == 400, content_type
        assert "send 'Content-Type: application/json'" in answer.json["error"]["message"]
    name = cluster.router.fleet.engines[0].name
    assert (await cluster.client(f"/admin/engines/{name}/drain", b"", {**key, "content-type": ""})).status == 200
    assert (await cluster.client("/admin/engines", entry, key)).status == 201
