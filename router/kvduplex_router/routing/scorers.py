"""How good an engine is for a request, in [0, 1], one aspect each. Pure: facts in, a number out.

Overlap and load are measured in the same unit, seconds as a part of the longest such time among the candidates: of
computing, of waiting to begin, and by which the answer takes longer for what the engine is serving besides. With equal
weights the best sum is therefore the earliest answer, and the weight of the overlap says how many seconds of waiting a
second of saved computation is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kvduplex_router.config import WeightsConfig

__all__ = ["SCORERS", "View", "total"]


class View(msgspec.Struct, frozen=True, gc=False):
    """An engine as scorers see it.

    Attributes:
        overlap_s: Seconds of computation that it is spared by what it holds.
        wait_s: Seconds until it begins and those that its other requests cost the answer, beyond what the whole prompt
            takes the fastest engine.
        session: Whether the session is hashed to it.
        home: Whether the prompt's beginning is hashed to it.
        scale_s: The longest time among the candidates, above 0.
    """

    overlap_s: float
    wait_s: float
    session: bool
    home: bool
    scale_s: float


def _unit(value: float) -> float:
    return 0.0 if value <= 0.0 else min(value, 1.0)


def overlap(view: View) -> float:
    """What it holds of the prompt already."""
    return _unit(view.overlap_s / view.scale_s)


def load(view: View) -> float:
    """How soon it begins, and how little slows the answer down."""
    return 1.0 - _unit(view.wait_s / view.scale_s)


def session(view: View) -> float:
    """Whether the session's other turns go there."""
    return 1.0 if view.session else 0.0


def home(view: View) -> float:
    """Whether prompts that begin like this one go there."""
    return 1.0 if view.home else 0.0


SCORERS: Final[dict[str, Callable[[View], float]]] = {
    "overlap": overlap,
    "load": load,
    "session": session,
    "home": home,
}


def total(view: View, weights: WeightsConfig) -> float:
    """The weighted sum."""
    sum_ = weights.overlap * overlap(view) + weights.load * load(view)
    if view.session:
        sum_ += weights.session
    return sum_ + weights.home if view.home else sum_
