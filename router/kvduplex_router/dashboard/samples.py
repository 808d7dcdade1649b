"""What two looks at the metrics say about the time between them. Pure.

Everything that cannot be known is None, which the page shows as missing: no request in the window is no hit rate, and
an engine that does not say how full its KV cache is has not an empty one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Sample", "parse", "quantile", "summary"]

_PREFIX: Final = "kvduplex_router_"

Labels = tuple[tuple[str, str], ...]


class Sample(msgspec.Struct, frozen=True):
    """One look.

    Attributes:
        at: Monotonic seconds.
        values: By name without prefix, then by labels.
    """

    at: float
    values: Mapping[str, Mapping[Labels, float]]

    def total(self, name: str, keep: Callable[[Mapping[str, str]], bool] = lambda _labels: True) -> float | None:
        """Sum over labels; None when there is no such sample."""
        found = [value for labels, value in self.values.get(name, {}).items() if keep(dict(labels))]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: defaultdict[str, float] = defaultdict(float)
        for labels, value in self.values.get(name, {}).items():
            sums[dict(labels).get(label, "")] += value
        return dict(sums)


def parse(exposition: bytes, at: float) -> Sample:
    """Read a router's exposition; other families are left out."""
    values: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(exposition.decode()):
        if family.name.startswith(_PREFIX):
            for sample in family.samples:
                values[sample.name.removeprefix(_PREFIX)][tuple(sorted(sample.labels.items()))] = sample.value
    return Sample(at, values)


def summary(now: Sample, before: Sample | None) -> dict[str, Any]:
    """What the page shows besides the engines."""
    prompt, cached = (_increase(now, before, name) for name in ("prompt_tokens_total", "cached_tokens_total"))
    return {
        "window_s": None if before is None else round(now.at - before.at, 1),
        "turns_in_flight": now.total("turns_in_flight"),
        "queued": now.total("queued"),
        "workers": now.total("workers"),
        "state_up": now.total("state_up"),
        "references": now.total("references"),
        "leases_renewed": now.total("leases_renewed" if now.total("shared_leases") is None else "shared_leases"),
        "turns_per_s": _rate(now, before, "turns_total"),
        "outcomes": _increases(now, before, "turns_total", "outcome"),
        "plans": _increases(now, before, "turns_total", "plan"),
        "refusals": _increases(now, before, "reuse_refused_total", "reason"),
        "hit_rate": _ratio(cached, prompt),
        "classes": _classes(now, before),
        "ttft_p50_s": _quantile(now, before, 0.5),
        "ttft_p95_s": _quantile(now, before, 0.95),
    }


def _classes(now: Sample, before: Sample | None) -> list[dict[str, Any]]:
    prompt = _increases(now, before, "prompt_tokens_total", "class") or {}
    cached = _increases(now, before, "cached_tokens_total", "class") or {}
    return [
        {"name": name or "all", "prompt_tokens": tokens, "hit_rate": _ratio(cached.get(name, 0.0), tokens)}
        for name, tokens in sorted(prompt.items())
    ]


def _increase(now: Sample, before: Sample | None, name: str) -> float | None:
    """How much a counter grew; a counter that fell was restarted and counts from zero."""
    if before is None or (value := now.total(name)) is None:
        return None
    former = before.total(name) or 0.0
    return value - former if value >= former else value


def _increases(now: Sample, before: Sample | None, name: str, label: str) -> dict[str, float] | None:
    if before is None:
        return None
    former = before.by(name, label)
    grown = {key: value - former.get(key, 0.0) for key, value in now.by(name, label).items()}
    return {key: value for key, value in grown.items() if value > 0}


def _rate(now: Sample, before: Sample | None, name: str) -> float | None:
    grown = _increase(now, before, name)
    return None if grown is None or before is None or now.at <= before.at else grown / (now.at - before.at)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else min(part / whole, 1.0)


def _quantile(now: Sample, before: Sample | None, share: float) -> float | None:
    if before is None:
        return None
    upto, former = now.by("ttft_seconds_bucket", "le"), before.by("ttft_seconds_bucket", "le")
    return quantile(((float(bound), count - former.get(bound, 0.0)) for bound, count in upto.items()), share)


def quantile(buckets: Iterable[tuple[float, float]], share: float) -> float | None:
    """A quantile of cumulative counts by upper bound, as Prometheus interpolates it; None of nothing."""
    ordered = sorted(buckets)
    if not ordered or ordered[-1][1] <= 0:
        return None
    wanted = share * ordered[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *ordered]):
        if upto >= wanted and upto > below:
            return low if high == float("inf") else low + (high - low) * (wanted - below) / (upto - below)
    return None
