"""Prometheus text becomes CloudWatch data: counters as increases, histograms as distributions, gauges as they are."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvduplex.aws.metrics import Datum, Metric, data, read


class Router:
    """A registry with the router's own names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompt = Counter("kvduplex_router_prompt_tokens", "x", registry=self.registry)
        self.refused = Counter("kvduplex_router_reuse_refused", "x", ["reason"], registry=self.registry)
        self.up = Gauge("kvduplex_router_engine_up", "x", ["engine"], registry=self.registry)
        self.hops = Histogram(
            "kvduplex_router_hop_seconds", "x", ["hop"], buckets=(0.1, 1.0, 10.0), registry=self.registry
        )

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def by_metric(found: list[Datum]) -> dict[Metric, Datum]:
    return {datum.metric: datum for datum in found}


def test_counters_are_increases_from_the_second_look_on() -> None:
    router = Router()
    router.prompt.inc(100)
    first = read(router.text())
    assert Metric.PROMPT_TOKENS not in by_metric(data(first, {}))
    router.prompt.inc(30)
    found = by_metric(data(read(router.text()), first))
    assert found[Metric.PROMPT_TOKENS] == Datum(Metric.PROMPT_TOKENS, "Count", (30.0,), (1.0,))


def test_a_restarted_counter_counts_from_zero() -> None:
    router = Router()
    router.prompt.inc(100)
    first = read(router.text())
    fresh = Router()
    fresh.prompt.inc(7)
    assert by_metric(data(read(fresh.text()), first))[Metric.PROMPT_TOKENS].values == (7.0,)


def test_refusals_count_what_was_lost_and_not_first_turns() -> None:
    router = Router()
    router.refused.labels("first_turn").inc(50)
    router.refused.labels("expired").inc(0)
    first = read(router.text())
    router.refused.labels("first_turn").inc(50)
    router.refused.labels("expired").inc(3)
    assert by_metric(data(read(router.text()), first))[Metric.LEASE_REFUSALS].values == (3.0,)


def test_a_lease_that_its_engine_dropped_is_lost() -> None:
    router = Router()
    router.refused.labels("lease_lost").inc(1)
    first = read(router.text())
    router.refused.labels("lease_lost").inc(4)
    assert by_metric(data(read(router.text()), first))[Metric.LEASE_REFUSALS].values == (4.0,)


def test_engines_down_are_counted() -> None:
    router = Router()
    for engine, up in (("p", 1), ("d1", 0), ("d2", 0)):
        router.up.labels(engine).set(up)
    assert by_metric(data(read(router.text()), {}))[Metric.ENGINES_DOWN].values == (2.0,)


@pytest.mark.parametrize(("up", "down"), [(1, 0.0), (0, 1.0)])
def test_a_router_without_its_store_is_counted(up: int, down: float) -> None:
    router = Router()
    Gauge("kvduplex_router_state_up", "x", registry=router.registry).set(up)
    assert by_metric(data(read(router.text()), {}))[Metric.STORE_DOWN].values == (down,)


def test_a_router_that_shares_no_store_has_none_to_lose() -> None:
    assert Metric.STORE_DOWN not in by_metric(data(read(Router().text()), {}))


def test_a_histogram_becomes_a_distribution_of_its_new_observations() -> None:
    router = Router()
    router.hops.labels("prefill").observe(0.05)
    router.hops.labels("decode").observe(9)
    first = read(router.text())
    for seconds in (0.05, 0.5, 0.5, 50):
        router.hops.labels("prefill").observe(seconds)
    datum = by_metric(data(read(router.text()), first))[Metric.TTFT]
    assert datum.unit == "Seconds"
    # Middles of the buckets; what lies above the last bound counts as that bound.
    assert datum.values == pytest.approx((0.05, 0.55, 10.0))
    assert datum.counts == (1.0, 2.0, 1.0)


def test_nothing_new_is_nothing_to_publish() -> None:
    router = Router()
    router.hops.labels("prefill").observe(0.05)
    first = read(router.text())
    assert Metric.TTFT not in by_metric(data(read(router.text()), first))


def test_the_engines_gauge_is_taken_as_it_is() -> None:
    text = "# TYPE vllm:kv_cache_usage_perc gauge\n" + "".join(
        f'vllm:kv_cache_usage_perc{{engine="{n}"}} {value}\n' for n, value in enumerate((0.25, 0.75))
    )
    assert by_metric(data(read(text), {}))[Metric.KV_USAGE].values == (0.75,)


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(ValueError, match="float"):
        read("<html>{")
