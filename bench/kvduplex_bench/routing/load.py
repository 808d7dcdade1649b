"""What 80 % load means: a share of the rate that the fleet can bear when every conversation finds its cache."""

from __future__ import annotations

from typing import Final

from kvduplex_bench.routing.stats import percentile
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_bench.simulate.fleet import play_replicas
from kvduplex_bench.traces.model import Trace

__all__ = ["BEARABLE_P95_S", "bearable_rate"]

BEARABLE_P95_S: Final = 3.0
"""The fleet is full when the 95th percentile of TTFT under session affinity comes to so many seconds."""

_PROBES: Final = 7
_HORIZON_S: Final = 120.0


def bearable_rate(trace: Trace, timing: Timing, *, replicas: int) -> float:
    """Conversations a second at which the fleet is full, from a simulation in virtual time.

    Session affinity is what every router here can do, so the rate favours none.
    """
    low, high = 0.0, 4.0
    while _p95(trace, timing, replicas, high) < BEARABLE_P95_S and high < 1024:  # noqa: PLR2004 - beyond any fleet
        low, high = high, high * 2
    for _ in range(_PROBES):
        middle = (low + high) / 2
        low, high = (middle, high) if _p95(trace, timing, replicas, middle) < BEARABLE_P95_S else (low, middle)
    return low


def _p95(trace: Trace, timing: Timing, replicas: int, rate: float) -> float:
    offered = trace.starting_by(_HORIZON_S, rate)
    outcomes = play_replicas(offered, timing, replicas=replicas, rate=rate, policy="session")
    return percentile([each.ttft_s for each in outcomes if _HORIZON_S / 4 < each.asked < _HORIZON_S], 0.95)
