"""Sums over a playback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvduplex_bench.routing.play import Played

__all__ = ["EngineSums", "Summary", "percentile", "summarise"]


@dataclass(frozen=True, slots=True)
class EngineSums:
    """Counters of all engines that compute prompts, added up.

    Attributes:
        prompt_tokens: Tokens of prompts.
        local_hits: Of those, found in the engine's own cache.
        external: Of those, read from another engine.
        late_s: Lateness of all engines' steps together, in seconds of the clock.
        steps: Steps.
        lag_s: Longest lateness of any engine's step.
    """

    prompt_tokens: float = 0.0
    local_hits: float = 0.0
    external: float = 0.0
    late_s: float = 0.0
    steps: float = 0.0
    lag_s: float = 0.0

    def since(self, before: EngineSums) -> EngineSums:
        """What was added since."""
        return EngineSums(
            self.prompt_tokens - before.prompt_tokens,
            self.local_hits - before.local_hits,
            self.external - before.external,
            self.late_s - before.late_s,
            self.steps - before.steps,
            self.lag_s,
        )

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens that were not computed."""
        return (self.local_hits + self.external) / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm on one trace.

    Attributes:
        requests: Answered and counted.
        failed: Not answered.
        cached_share: Share of prompt tokens not computed, by the engines' counters.
        ttft_mean_s: Mean time to first token.
        ttft_p50_s: Its median.
        ttft_p95_s: Its 95th percentile.
        e2e_mean_s: Mean time to the last token.
        output_tokens_per_s: Throughput over the counted window.
        requests_per_s: The same in requests.
        late_s: Mean lateness of the engines' steps, in seconds of the clock.
        lag_s: The longest.
    """

    requests: int
    failed: int
    cached_share: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    e2e_mean_s: float
    output_tokens_per_s: float
    requests_per_s: float
    late_s: float
    lag_s: float

    def believable(self, time_scale: float) -> bool:
        """Whether the engines kept their times well enough: late by a tenth of the mean TTFT at most."""
        return self.late_s <= self.ttft_mean_s * time_scale / 10


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of `values` do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def summarise(played: Sequence[Played], engines: EngineSums, *, begin_s: float, end_s: float) -> Summary:
    """Sum up the turns asked from `begin_s` on and before `end_s`; throughput counts answers that ended in between."""
    counted = [each for each in played if begin_s <= each.asked < end_s]
    good = [each for each in counted if not each.error]
    ended = [each for each in played if not each.error and begin_s <= each.ended < end_s]
    span_s = max(end_s - begin_s, 1e-9)
    first = [each.ttft_s for each in good]
    return Summary(
        requests=len(good),
        failed=len(counted) - len(good),
        cached_share=engines.cached_share,
        ttft_mean_s=sum(first) / len(first) if first else 0.0,
        ttft_p50_s=percentile(first, 0.5),
        ttft_p95_s=percentile(first, 0.95),
        e2e_mean_s=sum(each.e2e_s for each in good) / len(good) if good else 0.0,
        output_tokens_per_s=sum(each.output_tokens for each in ended) / span_s,
        requests_per_s=len(ended) / span_s,
        late_s=engines.late_s / engines.steps if engines.steps else 0.0,
        lag_s=engines.lag_s,
    )
