"""Values that other rooms keep, exposed when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Family", "FamilyCollector"]

Family = tuple[str, str, str, tuple[str, ...], Iterable[tuple[tuple[str, ...], float]]]
"""``counter`` or ``gauge``, name without prefix, help, label names, and samples as label values and value."""


class FamilyCollector(Collector):
    """Exposes what all of `reads` return.

    Args:
        reads: Called at every scrape.
    """

    def __init__(self, *reads: Callable[[], Iterable[Family]]) -> None:
        self._reads = reads

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        for kind, name, help_text, labels, samples in chain.from_iterable(read() for read in self._reads):
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(f"kvduplex_router_{name}", help_text, labels=labels)
            for values, value in samples:
                family.add_metric(values, value)
            yield family
