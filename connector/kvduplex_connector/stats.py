"""Lease metrics on vLLM's own Prometheus endpoint, next to those of the base connector."""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from kvduplex_connector.recorder import COUNTERS, GAUGES, HISTOGRAMS, LABELLED

__all__ = ["LeaseKVConnectorStats", "LeasePromMetrics"]

_NAME: Final = "kvduplex_lease_"
_BUCKETS: Final = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0]


class LeaseKVConnectorStats(NixlKVConnectorStats):  # type: ignore[misc]
    """The base connector's statistics and those of leases, which travel as ``lease:`` keys of the same lists."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={})
        self.data.update(data or {})

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return super().is_empty() and not any(key.startswith("lease:") for key in self.data)

    def aggregate(self, other: Any) -> LeaseKVConnectorStats:
        """Add what `other` holds."""
        for key, values in other.data.items():
            self.data.setdefault(key, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Totals of an interval for the engine's log line."""
        reduced: dict[str, int | float] = super().reduce()
        for key, values in self.data.items():
            if key.startswith("lease:") and values:
                name = key.removeprefix("lease:")
                is_sum = name.split(":")[0] in COUNTERS or name.split(":")[0] in LABELLED
                reduced[f"Lease {name}"] = sum(values) if is_sum else round(values[-1], 4)
        return reduced


class LeasePromMetrics(NixlPromMetrics):  # type: ignore[misc]
    """Registers and feeds ``kvduplex_lease_*``."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], values: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        self._counters = {
            name: self._counter_cls(name=_NAME + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._labelled = {
            name: self._counter_cls(name=_NAME + name, documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in LABELLED.items()
        }
        # With several API servers each of them sees the same engine, so the latest value is the true one.
        self._gauges = {
            name: self._gauge_cls(
                name=_NAME + name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in GAUGES.items()
        }
        self._histograms = {
            name: self._histogram_cls(name=_NAME + name, documentation=text, labelnames=labelnames, buckets=_BUCKETS)
            for name, text in HISTOGRAMS.items()
        }
        for labels in values.values():  # a metric that exists at 0 can be alerted on
            for metric in (*self._counters.values(), *self._gauges.values(), *self._histograms.values()):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Feed the metrics with one interval of one engine."""
        super().observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for key, values in transfer_stats_data.items():
            if key.startswith("lease:"):
                self._feed(key.split(":")[1:], values, labels)

    def _feed(self, path: list[str], values: list[float], labels: list[Any]) -> None:
        name = path[0]
        if name in self._counters:
            self._counters[name].labels(*labels).inc(sum(values))
        elif name in self._labelled:
            self._labelled[name].labels(*labels, ":".join(path[1:])).inc(sum(values))
        elif name in self._gauges:
            self._gauges[name].labels(*labels).set(values[-1])
        elif name in self._histograms:
            for value in values:
                self._histograms[name].labels(*labels).observe(value)
