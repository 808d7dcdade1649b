"""Requests generated from the served OpenAPI document: each gets a documented answer in the documented form."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvduplex_router.api.app import build_app
from kvduplex_router.requests.apis import ALL


async def _unused(*_: Any) -> None: ...


def _schema() -> Any:
    endpoints = {kind.path: _unused for kind in ALL}
    app = build_app(endpoints=endpoints, routers=(), lifespan=contextlib.nullcontext, version="0")  # type: ignore[arg-type]
    return schemathesis.openapi.from_dict(app.openapi())


SCHEMA = _schema()
DOCUMENTED = {200, 400, 413, 429, 502, 503, 504}


def operations(mode: Any) -> st.SearchStrategy[Any]:
    return st.one_of([SCHEMA[kind.path]["POST"].as_strategy(generation_mode=mode) for kind in ALL])


GENERATED = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


async def _check(cluster: Any, case: Any) -> None:
    headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != "content-length"}
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    answer = await cluster.client(case.path, body, {"content-type": "application/json", **headers}, method="POST")
    assert answer.status in DOCUMENTED
    if answer.status != 200:
        assert answer.json["error"]["message"]
    assert cluster.idle()


@GENERATED
@given(case=operations(schemathesis.GenerationMode.POSITIVE))
async def test_requests_that_follow_the_document(make_cluster: Any, case: Any) -> None:
    await _check(await _shared(make_cluster), case)


@GENERATED
@given(case=operations(schemathesis.GenerationMode.NEGATIVE))
async def test_requests_that_break_it(make_cluster: Any, case: Any) -> None:
    await _check(await _shared(make_cluster), case)


async def _shared(make_cluster: Any) -> Any:
    """One cluster for all examples of a test."""
    if not hasattr(make_cluster, "made"):
        make_cluster.made = await make_cluster()
    return make_cluster.made
