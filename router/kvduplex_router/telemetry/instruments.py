"""Counters and histograms that cost a dictionary access, exposed through prometheus_client when scraped.

prometheus_client's own instruments take a lock and look labels up by building keys on each use; a router touches a
dozen per request from a single thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Counter", "Histogram"]


class Counter(Collector):
    """A value per combination of labels that only grows."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self._values[()] = 0.0

    def inc(self, *labels: str, by: float = 1.0) -> None:
        """Add to the value of `labels`."""
        self._values[labels] += by

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, value in list(self._values.items()):
            family.add_metric(labels, value)
        yield family


class Histogram(Collector):
    """Counts of observed values by upper bound, per combination of labels."""

    def __init__(self, name: str, help_text: str, *labels: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._bounds = bounds
        self._counts: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        self._sums: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def observe(self, value: float, *labels: str) -> None:
        """Count one value."""
        self._counts[labels][bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for labels, counts in list(self._counts.items()):
            family.add_metric(labels, self._buckets(counts), self._sums[labels])
        yield family

    def _buckets(self, counts: list[int]) -> list[tuple[str, float]]:
        names = [*(repr(bound) for bound in self._bounds), "+Inf"]
        total = 0
        buckets: list[tuple[str, float]] = []
        for name, count in zip(names, counts, strict=True):
            total += count
            buckets.append((name, total))
        return buckets
