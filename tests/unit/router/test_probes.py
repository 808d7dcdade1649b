"""What probes and benchmark clients ask of any vLLM server, asked of the router."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest


async def test_ping_is_answered_as_health_is(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "long-enough-key")
    cluster = await make_cluster(auth={"keys_env": "KEYS"})
    for method in ("GET", "POST"):
        answer = await cluster.client("/ping", method=method)
        assert (answer.status, answer.body) == (200, b"")
    assert (await cluster.client("/ping", method="DELETE")).status == 405
    assert not cluster.d.requests


async def test_version_is_the_routers_in_vllms_form_and_for_clients(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS", "long-enough-key")
    cluster = await make_cluster(auth={"keys_env": "KEYS"})
    assert (await cluster.client("/version")).status == 401
    answer = await cluster.client("/version", headers={"authorization": "Bearer long-enough-key"})
    assert answer.json == {"version": version("kvduplex")}
