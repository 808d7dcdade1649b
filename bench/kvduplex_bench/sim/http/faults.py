"""Failures on command."""

from __future__ import annotations

from random import Random

import msgspec

__all__ = ["Faults"]


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is wrong with an engine; everything false or neutral when nothing is.

    Attributes:
        hang: Completions are read and never answered.
        unhealthy: ``/health`` answers 503.
        error_rate: Share of completions answered with 500, 0 to 1.
        break_rate: Share of streams that break off after their first token, 0 to 1.
        slow: Everything takes so many times longer.
        kill: End at once: connections reset, KV and leases lost.
    """

    hang: bool = False
    unhealthy: bool = False
    error_rate: float = 0.0
    break_rate: float = 0.0
    slow: float = 1.0
    kill: bool = False

    def __post_init__(self) -> None:
        for name in ("error_rate", "break_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be 0 to 1, got {getattr(self, name)}")
        if not 0.01 <= self.slow <= 1000:  # noqa: PLR2004 - a bound on nonsense
            raise ValueError(f"slow must be 0.01 to 1000, got {self.slow}")

    def errs(self, chance: Random) -> bool:
        """Whether this request fails."""
        return self.error_rate > 0 and chance.random() < self.error_rate

    def breaks(self, chance: Random) -> bool:
        """Whether this stream breaks off."""
        return self.break_rate > 0 and chance.random() < self.break_rate
