"""Which Prometheus series become which CloudWatch metrics, and how. Pure.

Counters become the increase since the last look, histograms their buckets' increases as a distribution (so that
CloudWatch can give percentiles), gauges themselves. CloudWatch's own agent drops histograms ("Prometheus metric type
conversion" in its user guide), which is why this exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["MAX_VALUES", "Datum", "Metric", "Reading", "Source", "data", "read"]

MAX_VALUES: Final = 150
"""Values one datum may carry (PutMetricData, "MetricDatum")."""


class Metric(StrEnum):
    """Names in namespace ``kvduplex``; dimensions are ``Cluster`` and ``Role``."""

    PROMPT_TOKENS = "PromptTokens"
    CACHED_TOKENS = "CachedTokens"
    TTFT = "TimeToFirstToken"
    KV_USAGE = "KvUsage"
    ENGINES_DOWN = "EnginesDown"
    LEASE_REFUSALS = "LeaseRefusals"
    STORE_DOWN = "StoreDown"
    ACCELERATOR_USE = "AcceleratorUse"
    ACCELERATOR_ERRORS = "AcceleratorErrors"
    EFA_READ_BYTES = "EfaReadBytes"
    EFA_DROPS = "EfaDrops"


class Kind(StrEnum):
    """How readings are turned into a datum."""

    INCREASE = "increase"
    MAXIMUM = "maximum"
    COUNT_ZEROS = "count_zeros"
    """How many series are 0, for gauges that are 1 while all is well."""
    DISTRIBUTION = "distribution"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a metric comes from.

    Attributes:
        metric: What it becomes.
        family: Prometheus family, without the suffix of its samples.
        kind: How.
        unit: CloudWatch's unit.
        labels: Values that a sample must have, by label; any value when not named.
    """

    metric: Metric
    family: str
    kind: Kind
    unit: str
    labels: Mapping[str, frozenset[str]] = field(default_factory=dict)


# A claim refused for one of these reasons was lost to time, memory or a fault; other turns never had one to use.
_LOST: Final = frozenset({"expired", "lease_lost", "engine_gone", "engine_restarted", "reclaimed", "busy"})

SOURCES: Final = (
    Source(Metric.PROMPT_TOKENS, "kvduplex_router_prompt_tokens", Kind.INCREASE, "Count"),
    Source(Metric.CACHED_TOKENS, "kvduplex_router_cached_tokens", Kind.INCREASE, "Count"),
    Source(Metric.ENGINES_DOWN, "kvduplex_router_engine_up", Kind.COUNT_ZEROS, "Count"),
    Source(Metric.LEASE_REFUSALS, "kvduplex_router_reuse_refused", Kind.INCREASE, "Count", {"reason": _LOST}),
    # Absent where routers share no store.
    Source(Metric.STORE_DOWN, "kvduplex_router_state_up", Kind.COUNT_ZEROS, "Count"),
    Source(Metric.TTFT, "kvduplex_router_ttft_seconds", Kind.DISTRIBUTION, "Seconds"),
    # Routers without that histogram: until the prefill engine's answer, which the first token follows closely.
    Source(Metric.TTFT, "kvduplex_router_hop_seconds", Kind.DISTRIBUTION, "Seconds", {"hop": frozenset({"prefill"})}),
    Source(Metric.KV_USAGE, "vllm:kv_cache_usage_perc", Kind.MAXIMUM, "None"),
    Source(Metric.ACCELERATOR_USE, "DCGM_FI_DEV_GPU_UTIL", Kind.MAXIMUM, "Percent"),
    Source(Metric.ACCELERATOR_ERRORS, "DCGM_FI_DEV_XID_ERRORS", Kind.MAXIMUM, "None"),
    Source(Metric.ACCELERATOR_USE, "neuroncore_utilization_ratio", Kind.MAXIMUM, "None"),
    Source(Metric.ACCELERATOR_ERRORS, "execution_errors", Kind.INCREASE, "Count"),
)
"""In order: of several sources of one metric, the first that a machine has is used."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one scrape said about one source: a number, or a histogram's cumulative counts by upper bound."""

    source: Source
    value: float = 0.0
    buckets: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Datum:
    """One CloudWatch datum; `counts` says how often each value was seen."""

    metric: Metric
    unit: str
    values: tuple[float, ...]
    counts: tuple[float, ...]


def read(text: str, sources: Sequence[Source] = SOURCES) -> dict[Metric, Reading]:
    """Readings of a text exposition, by metric.

    Raises:
        ValueError: The text is no exposition.
    """
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found: dict[Metric, Reading] = {}
    for source in sources:
        if source.metric not in found and source.family in families:
            found[source.metric] = _reading(source, families[source.family])
    return found


def data(now: Mapping[Metric, Reading], before: Mapping[Metric, Reading]) -> list[Datum]:
    """What is to be published after two scrapes; a counter that fell was restarted and counts from zero."""
    published = (_datum(reading, before.get(metric)) for metric, reading in now.items())
    return [datum for datum in published if datum is not None]


def _reading(source: Source, family: Family) -> Reading:
    samples = [
        sample
        for sample in family.samples
        if all(sample.labels.get(label) in allowed for label, allowed in source.labels.items())
    ]
    if source.kind is Kind.DISTRIBUTION:
        return Reading(source, buckets=_buckets((s.labels["le"], s.value) for s in samples if "le" in s.labels))
    values = [sample.value for sample in samples if not sample.name.endswith("_created")]
    return Reading(source, value=_REDUCE[source.kind](values))


_REDUCE: Final[Mapping[Kind, Callable[[list[float]], float]]] = {
    Kind.INCREASE: sum,
    Kind.MAXIMUM: lambda values: max(values, default=0.0),
    Kind.COUNT_ZEROS: lambda values: float(values.count(0.0)),
}


def _buckets(samples: Iterable[tuple[str, float]]) -> tuple[tuple[float, float], ...]:
    """Cumulative counts by bound, over all label sets."""
    totals: dict[float, float] = {}
    for bound, count in samples:
        totals[float(bound)] = totals.get(float(bound), 0.0) + count
    return tuple(sorted(totals.items()))


def _datum(reading: Reading, before: Reading | None) -> Datum | None:
    source = reading.source
    if source.kind is Kind.DISTRIBUTION:
        return _distribution(reading, before)
    if source.kind is not Kind.INCREASE:
        return Datum(source.metric, source.unit, (reading.value,), (1.0,))
    if before is None:
        return None
    fell = reading.value < before.value
    return Datum(source.metric, source.unit, (reading.value - (0 if fell else before.value),), (1.0,))


def _distribution(reading: Reading, before: Reading | None) -> Datum | None:
    if before is None or not reading.buckets:
        return None
    earlier = dict(before.buckets)
    if any(count < earlier.get(bound, 0.0) for bound, count in reading.buckets):
        earlier = {}
    cumulative = [(0.0, 0.0), *((bound, count - earlier.get(bound, 0.0)) for bound, count in reading.buckets)]
    values: list[float] = []
    counts: list[float] = []
    for (low, below), (high, upto) in pairwise(cumulative):
        if upto > below:
            # The middle of a bucket; what lies above the last bound is at least that bound.
            values.append(low if high == float("inf") else (low + high) / 2)
            counts.append(upto - below)
    if not values:
        return None
    return Datum(reading.source.metric, reading.source.unit, tuple(values[:MAX_VALUES]), tuple(counts[:MAX_VALUES]))
