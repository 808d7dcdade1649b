"""What 80 % load means: a share of the rate that the fleet can bear when every conversation finds its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvduplex_bench.routing.stats import percentile
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_bench.simulate.clockwork import Agenda
from kvduplex_bench.simulate.fleet import Outcome, Player, play_replicas
from kvduplex_bench.simulate.pd import PdFleet, PdSettings
from kvduplex_bench.traces.model import Trace

__all__ = ["BEARABLE_P95_S", "bearable_rate"]

BEARABLE_P95_S: Final = 3.0
"""The fleet is full when the 95th percentile of TTFT comes to so many seconds."""

_PROBES: Final = 5
_HORIZON_S: Final = 120.0
_MOST: Final = 1024.0
_GROWTH: Final = 1.5


def bearable_rate(trace: Trace, timing: Timing, *, replicas: int = 0, prefill: int = 0, decode: int = 0) -> float:
    """Conversations a second at which the fleet is full, from a simulation in virtual time.

    Replicas are picked by session affinity, prefill engines by the cheapest prompt with nothing pulled back: what
    routers can do without leases, so that the rate favours none of those compared.
    """

    def play(rate: float) -> Sequence[Outcome]:
        offered = trace.starting_by(_HORIZON_S, rate)
        if replicas:
            return play_replicas(offered, timing, replicas=replicas, rate=rate, policy="session")
        agenda = Agenda()
        fleet = PdFleet(PdSettings(timing, prefill, decode, plan="recompute"), agenda)
        return Player(offered, rate, timing.block_size, agenda, fleet.serve).run()

    return _last_bearable(play)


def _last_bearable(play: Callable[[float], Sequence[Outcome]]) -> float:
    low, high = 0.0, 1.0
    while high < _MOST and _p95(play(high)) < BEARABLE_P95_S:
        low, high = high, high * _GROWTH  # gently: a fleet far beyond its limits takes long to simulate
    for _ in range(_PROBES):
        middle = (low + high) / 2
        low, high = (middle, high) if _p95(play(middle)) < BEARABLE_P95_S else (low, middle)
    return low


def _p95(outcomes: Sequence[Outcome]) -> float:
    return percentile([each.ttft_s for each in outcomes if _HORIZON_S / 4 < each.asked < _HORIZON_S], 0.95)
