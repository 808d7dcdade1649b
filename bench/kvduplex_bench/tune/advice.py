"""From costs and the users' habits to settings. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvduplex_bench.errors import BenchError
from kvduplex_bench.tune.costs import Compute, Read

__all__ = ["Advice", "Habits", "advise"]

_MOST_TOKENS: Final = 1_000_000
_HEARTBEAT_S: Final = 10.0
_LOST_HEARTBEATS: Final = 2
_LEAST_TTL_S: Final = 30.0
_LEAST_KEPT_S: Final = 60.0
_ROUND_S: Final = 30.0
_MOST_BUDGET: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What the users of a cluster do.

    Attributes:
        gap_p50_s: Half of all next turns come within this time after an answer.
        gap_p95_s: And 95 in a hundred within this.
        conversations: Open conversations of one decode engine.
        context_tokens: Tokens of such a conversation, usually.
        in_flight: Requests that the decode engine generates for at the same time.
    """

    gap_p50_s: float = 20.0
    gap_p95_s: float = 240.0
    conversations: int = 16
    context_tokens: int = 8_000
    in_flight: int = 4

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            BenchError: Names the option.
        """
        if not 0 < self.gap_p50_s <= self.gap_p95_s:
            raise BenchError(f"--gap-p50 {self.gap_p50_s:g}: must be above 0, and at most --gap-p95 {self.gap_p95_s:g}")
        for name in ("conversations", "context_tokens", "in_flight"):
            if getattr(self, name) < 1:
                raise BenchError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings.

    Attributes:
        kv_recompute_threshold: Fewest tokens worth reading; None when reading never pays.
        lease_ttl_s: Life of a lease from a renewal.
        decoder_kv_blocks_ttl: Longest life of a lease.
        keep_s: What the router renews a lease for, per turn so far.
        retention_budget: Share of the decode engine's blocks that leases may hold.
        wanted: What share the conversations would take; above the budget some are given up early.
        held: Conversations that fit into the budget.
    """

    kv_recompute_threshold: int | None
    lease_ttl_s: float
    decoder_kv_blocks_ttl: int
    keep_s: float
    retention_budget: float
    wanted: float
    held: int


def advise(compute: Compute, read: Read, habits: Habits, *, block_size: int, capacity_tokens: int) -> Advice:
    """What to set.

    Args:
        compute: Cost of computing, on the prefill engine.
        read: Cost of reading.
        habits: Of the users.
        block_size: Tokens of a KV block.
        capacity_tokens: Tokens that the decode engine's KV cache holds.
    """
    longest = max(_LEAST_KEPT_S, _up(habits.gap_p95_s, _ROUND_S))
    wanted = habits.conversations * habits.context_tokens / capacity_tokens
    spare = 1 - habits.in_flight * habits.context_tokens / capacity_tokens
    budget = math.floor(100 * min(_MOST_BUDGET, max(0.0, spare), _up(wanted, 0.01))) / 100
    return Advice(
        kv_recompute_threshold=_threshold(compute, read, block_size),
        # A lease outlives two lost renewals, whatever the gap; how long it is renewed is the router's business.
        lease_ttl_s=max(_LEAST_TTL_S, (_LOST_HEARTBEATS + 1) * _HEARTBEAT_S),
        decoder_kv_blocks_ttl=int(longest),
        keep_s=min(longest, max(_ROUND_S, _up(habits.gap_p50_s, 5.0))),
        retention_budget=budget,
        wanted=wanted,
        held=int(budget * capacity_tokens / habits.context_tokens),
    )


def _threshold(compute: Compute, read: Read, block_size: int) -> int | None:
    """The least whole number of blocks that is read faster than computed, at the start of a prompt.

    Deeper in a prompt attention makes a token dearer to compute and no dearer to read, so it pays there too.
    """
    tokens = block_size
    while tokens <= _MOST_TOKENS:
        if read.seconds(tokens) < compute.saved_s(tokens):
            return tokens if tokens == block_size else _between(compute, read, tokens // 2, tokens, block_size)
        tokens *= 2
    return None


def _between(compute: Compute, read: Read, low: int, high: int, block_size: int) -> int:
    """Bisect in whole blocks; `low` does not pay, `high` does."""
    while high - low > block_size:
        middle = (low + high) // 2 // block_size * block_size
        if read.seconds(middle) < compute.saved_s(middle):
            high = middle
        else:
            low = middle
    return high


def _up(value: float, step: float) -> float:
    return math.ceil(round(value / step, 9)) * step
