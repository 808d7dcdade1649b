"""Sums over simulated turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvduplex_bench.routing.stats import percentile
from kvduplex_bench.simulate.fleet import Outcome

__all__ = ["sums"]


def sums(outcomes: Sequence[Outcome], *, begin_s: float, end_s: float) -> dict[str, Any]:
    """One row: turns asked from `begin_s` on and before `end_s`; throughput by what ended in between."""
    counted = [each for each in outcomes if begin_s <= each.asked < end_s]
    ended = [each for each in outcomes if begin_s <= each.asked + each.e2e_s < end_s]
    first = [each.ttft_s for each in counted]
    prompt = sum(each.prompt_tokens for each in counted)
    plans = Counter(each.plan for each in counted)
    span_s = max(end_s - begin_s, 1e-9)
    return {
        "turns": len(counted),
        "cached": sum(each.cached_tokens for each in counted) / max(prompt, 1),
        "ttft_mean_s": sum(first) / max(len(first), 1),
        "ttft_p50_s": percentile(first, 0.5),
        "ttft_p95_s": percentile(first, 0.95),
        "e2e_mean_s": sum(each.e2e_s for each in counted) / max(len(counted), 1),
        "tokens_per_s": sum(each.output_tokens for each in ended) / span_s,
        "plans": {plan: count for plan, count in plans.most_common() if plan},
    }
