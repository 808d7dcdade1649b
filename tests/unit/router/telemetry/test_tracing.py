"""Traces over both hops, as a collector receives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvduplex_router.config import build_config
from kvduplex_router.errors import ConfigError

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.service = ""
        self.server: asyncio.Server | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
        raw = await reader.readexactly(length)
        if "content-encoding: gzip" in head:
            import gzip  # noqa: PLC0415

            raw = gzip.decompress(raw)
        for group in ExportTraceServiceRequest.FromString(raw).resource_spans:
            self.service = next(a.value.string_value for a in group.resource.attributes if a.key == "service.name")
            for scope in group.scope_spans:
                self.spans.extend(scope.spans)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    made = Collector()
    made.server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    yield made
    made.server.close()
    await made.server.wait_closed()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_and_its_hops_are_one_trace_below_the_clients(
    make_cluster: Any, collector: Collector, tools: Any, stream: bool
) -> None:
    router = await make_cluster(telemetry={"otlp_endpoint": collector.url, "service_name": "test"})
    await router.client.chat(tools.chat_body("a secret prompt"), {"traceparent": CLIENT}, stream=stream)
    await router.stop_router()
    await tools.eventually(lambda: len(collector.spans) == 3, "all spans arrive when the router ends")
    by_name = {span.name: span for span in collector.spans}
    assert set(by_name) == {"turn chat", "prefill", "decode"}
    turn = by_name["turn chat"]
    assert turn.parent_span_id.hex() == "b7ad6b7169203331"
    assert {span.trace_id.hex() for span in collector.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    for name, engine in (("prefill", router.p), ("decode", router.d)):
        span = by_name[name]
        assert span.parent_span_id == turn.span_id
        assert attributes(span)["kvduplex.engine"] == engine.name
        assert turn.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        parent = engine.requests[0].headers["traceparent"]
        assert parent == f"00-0af7651916cd43dd8448eb211c80319c-{span.span_id.hex()}-01"
    told = attributes(turn)
    assert (told["kvduplex.plan"], told["kvduplex.outcome"]) == ("recompute", "ok")
    assert told["kvduplex.cached_tokens"] == 3
    assert collector.service == "test"
    assert not any(b"secret" in span.SerializeToString() for span in collector.spans)


async def test_failures_are_marked(make_cluster: Any, collector: Collector, tools: Any) -> None:
    router = await make_cluster(telemetry={"otlp_endpoint": collector.url}, retries=0)

    async def fail(request: Any) -> None:
        await request.reply({}, 503)

    router.p.handler = fail
    assert (await router.client.chat()).status == 503
    await router.stop_router()
    await tools.eventually(lambda: len(collector.spans) == 2)
    assert {span.name: (span.status.code, span.status.message) for span in collector.spans} == {
        "prefill": (2, "status"),
        "turn chat": (2, "status"),
    }


async def test_a_dead_collector_costs_nothing_but_the_traces(make_cluster: Any) -> None:
    router = await make_cluster(telemetry={"otlp_endpoint": "http://127.0.0.1:9"})
    for _ in range(20):
        assert (await router.client.chat()).status == 200
    async with asyncio.timeout(8):
        await router.stop_router()


async def test_turns_that_are_not_sampled_say_so_to_engines(make_cluster: Any) -> None:
    router = await make_cluster(telemetry={"otlp_endpoint": "http://127.0.0.1:9", "sample_ratio": 0.0})
    await router.client.chat()
    *_, flags = router.p.requests[0].headers["traceparent"].split("-")
    assert int(flags, 16) & 1 == 0


async def test_without_tracing_the_clients_context_goes_through(make_cluster: Any) -> None:
    router = await make_cluster()
    await router.client.chat(None, {"traceparent": CLIENT})
    assert {engine.requests[0].headers["traceparent"] for engine in (router.p, router.d)} == {CLIENT}


def test_a_bad_endpoint_is_named() -> None:
    with pytest.raises(ConfigError, match=r"telemetry.otlp_endpoint: 'collector:4318' is not a URL"):
        build_config(None, engines=("http://e:1",), otlp_endpoint="collector:4318")
