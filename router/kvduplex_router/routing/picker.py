"""Chooses one engine among candidates, behind one narrow interface that richer policies can take over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.routing.facts import Facts

__all__ = ["Choice", "LeastInFlight", "PickContext", "Picker", "Reason"]


class Reason(StrEnum):
    """What decided a choice."""

    LOAD = "load"
    ROUND_ROBIN = "round_robin"
    SESSION = "session"
    HOME = "home"
    OVERLAP = "overlap"
    SPILL = "spill"
    """Another engine holds more of the prompt and was too busy."""


class PickContext(msgspec.Struct):
    """What a choice may depend on.

    Attributes:
        preferred: Name of the engine that holds this conversation's KV.
        excluded: Engines that already failed this turn.
        facts: What was worked out about the request; None where only load and preference count.
        chosen: What a policy decided, set by the picker.
    """

    preferred: str | None = None
    excluded: frozenset[str] = frozenset()
    facts: Facts | None = None
    chosen: Choice | None = None


class Choice(msgspec.Struct, frozen=True):
    """An engine, and why it was picked.

    Attributes:
        engine: Which.
        reason: What decided.
        overlap: Prompt tokens it is expected to hold.
        runner_up: Who came second.
    """

    engine: Engine
    reason: Reason
    overlap: int = 0
    runner_up: Engine | None = None


class Picker(Protocol):
    """A policy."""

    def pick(self, candidates: Sequence[Engine], context: PickContext) -> Engine | None:
        """One usable engine with a free place, or None."""


_SLACK: Final = 4


class LeastInFlight:
    """The fewest requests in flight; of equals the one picked longest ago.

    A preferred engine goes first while it has at most twice the least load and a few requests more; a conversation's
    engine must not become everybody's.

    Args:
        picks: Numbers picks, those of others that pick from the same engines too.
    """

    def __init__(self, picks: Iterator[int]) -> None:
        self._picks = picks

    def pick(self, candidates: Sequence[Engine], context: PickContext) -> Engine | None:
        """Pick, see the class."""
        best: Engine | None = None
        preferred: Engine | None = None
        for engine in candidates:
            if not engine.usable or not engine.has_place or engine.name in context.excluded:
                continue
            if engine.name == context.preferred:
                preferred = engine
            if best is None or (engine.in_flight, engine.picked) < (best.in_flight, best.picked):
                best = engine
        if best is None:
            return None
        if preferred is not None and preferred.in_flight <= 2 * best.in_flight + _SLACK:
            best = preferred
        best.picked = next(self._picks)
        return best
