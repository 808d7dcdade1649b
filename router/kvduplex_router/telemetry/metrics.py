"""Prometheus metrics of the router; every label has a closed set of values or one per configured engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvduplex_router.fleet.breaker import BreakerState
from kvduplex_router.fleet.engine import Engine, EngineHealth
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.fleet.traits import Load
from kvduplex_router.telemetry.instruments import Counter, Histogram

__all__ = ["Metrics"]

_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0)

Gauges = Callable[[], dict[str, float]]


class Metrics:
    """The router's instruments, in a registry of their own.

    Args:
        fleet: Its engines are read when metrics are scraped, so that load costs nothing on the way of a request.
        gauges: Further values read at that time, by name without prefix.
    """

    def __init__(self, fleet: Fleet, gauges: Gauges) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.turns = self._counter("turns", "Turns ended, by API, plan and outcome.", "api", "plan", "outcome")
        self.refusals = self._counter(
            "reuse_refused", "Turns that did not use their last turn's KV, by reason.", "reason"
        )
        self.hop_failures = self._counter("hop_failures", "Hops that failed by the engine's fault.", "hop", "reason")
        self.rejections = self._counter("rejections", "Requests not let in, by reason.", "reason")
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens as the hop that computed the prompt reported them.", "class"
        )
        self.cached_tokens = self._counter("cached_tokens", "Of those, tokens that were not computed again.", "class")
        self.blocks_freed = self._counter(
            "blocks_freed", "Refused turns whose decode engine was asked to have the prompt's blocks freed.", "outcome"
        )
        self.prompt_mismatches = self._counter(
            "prompt_mismatches", "Turns in which both hops counted different prompt tokens."
        )
        self.hop_seconds = self._histogram(
            "hop_seconds", "Prefill hop: until its answer. Decode hop: until its first byte.", "hop"
        )
        self.ttft_seconds = self._histogram(
            "ttft_seconds", "Streams: from a request's arrival to the first frame sent to its client.", "api"
        )
        self.handoff_seconds = self._histogram(
            "handoff_seconds", "From the prefill engine's answer to the request to the decode engine."
        )
        self.registry.register(_Live(fleet, gauges))

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        counter = Counter(f"kvduplex_router_{name}", help_text, *labels)
        self.registry.register(counter)
        return counter

    def _histogram(self, name: str, help_text: str, *labels: str) -> Histogram:
        histogram = Histogram(f"kvduplex_router_{name}", help_text, *labels, bounds=_SECONDS)
        self.registry.register(histogram)
        return histogram


class _Live(Collector):
    """Values that are read rather than counted."""

    def __init__(self, fleet: Fleet, gauges: Gauges) -> None:
        self._fleet = fleet
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read them."""
        for name, (help_text, read) in _OF_ENGINES.items():
            family = GaugeMetricFamily(f"kvduplex_router_{name}", help_text, labels=["engine", "role"])
            for engine in self._fleet.engines:
                value = read(engine)
                if value is not None:
                    family.add_metric([engine.name, engine.role.value], value)
            yield family
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"kvduplex_router_{name}", name.replace("_", " ").capitalize() + ".", value=value)


_SILENT: Final = Load(None, None, None, 0.0)
_OF_ENGINES: Final[dict[str, tuple[str, Callable[[Engine], float | None]]]] = {
    "in_flight": ("Requests at an engine.", lambda engine: engine.in_flight),
    "engine_up": ("1 while /health answers.", lambda engine: engine.health is EngineHealth.UP),
    "breaker_open": (
        "1 while the engine is left alone.", lambda engine: engine.breaker.state is not BreakerState.CLOSED,
    ),
    "engine_shut": ("1 while it is drained, leaving or fits no other.", lambda engine: bool(engine.shut_because)),
    "engine_incompatible": ("1 while it fits no other.", lambda engine: "incompatible" in engine.shut_because),
    "engine_running": ("Requests that it says it computes.", lambda engine: (engine.load or _SILENT).running),
    "engine_waiting": ("Requests that it says it queues.", lambda engine: (engine.load or _SILENT).waiting),
    "engine_kv_usage": ("Part of its KV cache in use, as it says.", lambda engine: (engine.load or _SILENT).kv_usage),
}  # fmt: skip
"""What is read of every engine; one that does not say has no sample, for that is not 0."""
