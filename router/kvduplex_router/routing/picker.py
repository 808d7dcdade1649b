"""Chooses one engine among candidates, behind one narrow interface that richer policies can take over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvduplex_router.fleet.engine import Engine

__all__ = ["LeastInFlight", "PickContext", "Picker"]


@dataclass(frozen=True, slots=True)
class PickContext:
    """What a choice may depend on.

    Attributes:
        preferred: Name of the engine that holds this conversation's KV.
        excluded: Engines that already failed this turn.
    """

    preferred: str | None = None
    excluded: frozenset[str] = field(default_factory=frozenset)


class Picker(Protocol):
    """A policy."""

    def pick(self, candidates: Sequence[Engine], context: PickContext) -> Engine | None:
        """One usable engine with a free place, or None."""


class LeastInFlight:
    """The fewest requests in flight; of equals the one picked longest ago. A preferred engine goes first."""

    def __init__(self) -> None:
        self._picks = 0

    def pick(self, candidates: Sequence[Engine], context: PickContext) -> Engine | None:
        """Pick, see the class."""
        best: Engine | None = None
        for engine in candidates:
            if not engine.usable or not engine.has_place or engine.name in context.excluded:
                continue
            if engine.name == context.preferred:
                best = engine
                break
            if best is None or (engine.in_flight, engine.picked) < (best.in_flight, best.picked):
                best = engine
        if best is not None:
            self._picks += 1
            best.picked = self._picks
        return best
