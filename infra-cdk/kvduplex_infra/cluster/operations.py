"""What operators are told, and what the cluster may cost."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvduplex_infra.cluster.section import Email, Section

__all__ = ["Alarms", "Budget", "State"]

Share = Annotated[float, Field(gt=0, lt=1)]


class Alarms(Section):
    """Baselines; measure yours with ``kvduplex bench`` before relying on the alarms."""

    emails: tuple[Email, ...] = ()
    """Who is told; each has to confirm the subscription once."""
    hit_rate_min: Share = 0.3
    """Share of prompt tokens served from cache under which routing or memory is wrong."""
    ttft_p95_s: Annotated[float, Field(gt=0)] = 5.0
    kv_usage_max: Share = 0.95
    lease_refusals_per_minute: Annotated[float, Field(gt=0)] = 30.0


class Budget(Section):
    """A monthly limit that tells, and stops nothing."""

    monthly_usd: Annotated[float, Field(gt=0)]
    emails: Annotated[tuple[Email, ...], Field(min_length=1)]


class State(Section):
    """A Valkey store for what routers remember of conversations (metadata only, never KV or text)."""

    enabled: bool | None = None
    """With several routers, which share a store or compute a conversation anew that meets another, when not given."""
    max_storage_gb: Annotated[int, Field(ge=1, le=5000)] = 1
    max_ecpu_per_second: Annotated[int, Field(ge=1000, le=15_000_000)] = 5000
