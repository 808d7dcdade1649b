"""What happened since the engine last asked, in a shape that survives its way to the metrics process."""

from __future__ import annotations

from typing import Final

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "LABELLED", "LeaseRecorder", "key_of"]

COUNTERS: Final = {
    "began": "Leases a decode engine began",
    "trimmed": "Leases that kept only their first blocks for want of budget",
    "denied": "Leases that could not begin for want of budget",
    "renewed": "Renewals of a lease that was alive",
    "granted": "Claims granted, as seen by the prefill engine",
    "reused_tokens": "Prompt tokens whose KV was read from a decode engine under a claim",
    "verified_away_tokens": "Prompt tokens a lease held other KV for, kept from being read by the block-hash proof",
}
LABELLED: Final = {
    "ended": ("state", "Leases that ended, by final state"),
    "claims_ended": ("how", "Claims that ended at a decode engine, by how"),
    "refused": ("reason", "Claims that ended in recomputation, by reason"),
    "declined": ("reason", "Claims a decode engine refused, by reason"),
    "dropped": ("reason", "Lease messages dropped, by reason"),
}
GAUGES: Final = {
    "held": "Leases alive without a claim",
    "claimed": "Leases with an open claim",
    "blocks_pinned": "KV blocks pinned by leases, each counted once",
    "budget_use": "Pinned blocks over the retention budget, 0 to 1",
}
HISTOGRAMS: Final = {"claim_seconds": "Seconds from sending a claim to its answer or timeout"}

_PREFIX: Final = "lease"


def key_of(name: str, label: str = "") -> str:
    """Key under which the values of a metric travel: ``lease:NAME`` or ``lease:NAME:LABEL``."""
    return f"{_PREFIX}:{name}:{label}" if label else f"{_PREFIX}:{name}"


class LeaseRecorder:
    """Collects counts, observations and gauges; `drain` hands out what is new. Used by one thread."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._gauges: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def count(self, name: str, label: str = "", *, n: float = 1) -> None:
        """Add `n` events."""
        if n:
            values = self._values.setdefault(key_of(name, label), [0])
            values[0] += n

    def total(self, name: str, label: str = "", *, value: float) -> None:
        """Count what was added to a total kept elsewhere since this was last called."""
        key = key_of(name, label)
        self.count(name, label, n=value - self._totals.get(key, 0))
        self._totals[key] = value

    def observe(self, name: str, value: float) -> None:
        """Add one observation of a histogram."""
        self._values.setdefault(key_of(name), []).append(value)

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge; handed out only when it changed."""
        if self._gauges.get(name) != value:
            self._gauges[name] = value
            self._values[key_of(name)] = [value]

    def drain(self) -> dict[str, list[float]]:
        """What is new since the last call; empty when nothing is."""
        values, self._values = self._values, {}
        return values
