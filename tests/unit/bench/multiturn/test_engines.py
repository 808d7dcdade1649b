"""Engines' metrics over a real socket: what is summed, and what makes the sums worthless."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvduplex_bench.errors import BenchError, UnreachableError
from kvduplex_bench.multiturn import engines as module
from kvduplex_bench.multiturn.engines import Engines

if TYPE_CHECKING:
    from tests.unit.bench.multiturn.conftest import ScriptedRouter


def page(requests: int, *, cache: str = "False") -> str:
    """Metrics of an engine that did `requests` equal requests."""
    values = {
        "vllm:request_prefill_time_seconds_sum": 0.5 * requests,
        "vllm:request_prefill_time_seconds_count": requests,
        "vllm:request_queue_time_seconds_sum": 0.1 * requests,
        "vllm:nixl_xfer_time_seconds_sum": 0.06 * requests,
        "vllm:nixl_bytes_transferred_sum": 4096.0 * requests,
        "vllm:nixl_bytes_transferred_count": requests,
        "vllm:nixl_num_descriptors_sum": 4 * requests,
        "kvduplex_lease_claim_seconds_sum": 0.01 * requests,
        'vllm:prompt_tokens_by_source_total{source="local_compute"}': 150 * requests,
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': 2000 * requests,
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}': 32 * requests,
        f'vllm:cache_config_info{{enable_prefix_caching="{cache}"}}': 1,
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())


async def test_a_segment_is_the_difference_of_two_readings(router: ScriptedRouter) -> None:
    engines = Engines([router.url], [router.url])
    router.metrics = page(3)
    before = await engines.read()
    router.metrics = page(5)
    counted = await engines.since(before, 2)
    assert (counted.requests, counted.pulls, counted.pulled_pieces, counted.refused) == (2, 2, 8, 0)
    assert (counted.computed_tokens, counted.local_tokens, counted.pulled_tokens) == (300, 64, 4000)
    assert (counted.pulled_bytes, counted.handed_bytes) == (8192, 8192)
    assert (counted.prefill_s, counted.queue_s) == pytest.approx((1.0, 0.2))
    split = counted.split
    assert split is not None
    assert split.recompute_s == pytest.approx(0.5)
    assert (split.transfer_s, split.claim_s, split.queue_s) == pytest.approx((0.06, 0.01, 0.03))
    assert (counted + counted).requests == 4


async def test_others_traffic_is_noticed(router: ScriptedRouter) -> None:
    engines = Engines([router.url], [])
    router.metrics = page(3)
    before = await engines.read()
    router.metrics = page(6)
    with pytest.raises(BenchError, match="finished 3 requests while 2 were sent"):
        await engines.since(before, 2)


async def test_engines_that_the_router_does_not_use_are_noticed(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COUNTED_WITHIN_S", 0.1)
    router.metrics = page(3)
    engines = Engines([router.url], [])
    with pytest.raises(BenchError, match="counted 0 of 2 requests; does the router use"):
        await engines.since(await engines.read(), 2)


async def test_the_prefix_cache_is_read_off_and_must_be_the_same_everywhere(router: ScriptedRouter) -> None:
    engines = Engines([router.url], [])
    router.metrics = page(1, cache="True")
    assert await engines.prefill_cache() is True
    router.metrics = page(1)
    assert await engines.prefill_cache() is False
    router.metrics = page(1) + page(1, cache="True")
    with pytest.raises(BenchError, match="one kind only"):
        await engines.prefill_cache()
    router.metrics = "up 1\n"
    assert await engines.prefill_cache() is None


async def test_an_engine_that_is_gone_is_named() -> None:
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:1/metrics could not be read"):
        await Engines(["http://127.0.0.1:1"], []).read()
