"""Which workload class a request belongs to, and what that means for its routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvduplex_router.config import ClassConfig, MatchConfig, Policy, RoutingConfig, WeightsConfig

__all__ = ["Aspects", "Classifier", "Workload"]

_DEFAULT: Final = "default"


class Workload(msgspec.Struct, frozen=True):
    """A class with every setting filled in; see `kvduplex_router.config.ClassConfig`."""

    name: str
    policy: Policy
    weights: WeightsConfig
    boundary: str | int
    unique: bool


class Aspects(msgspec.Struct, frozen=True):
    """What rules look at."""

    api: str
    model: str | None
    tenant: str
    stream: bool
    tools: bool


_LOOKS: Final[dict[str, Callable[[Aspects], Any]]] = {
    "model": lambda traits: traits.model,
    "tenant": lambda traits: traits.tenant,
    "api": lambda traits: traits.api,
    "tools": lambda traits: traits.tools,
    "stream": lambda traits: traits.stream,
}


class Classifier:
    """Finds the class: the one a header names, else the first with a rule that holds, else the default.

    Args:
        config: The section.
        policy: What an absent policy stands for.
    """

    def __init__(self, config: RoutingConfig, policy: Policy) -> None:
        policy = config.policy or policy
        self.default = Workload(_DEFAULT, policy, config.weights, config.boundary, unique=False)
        self._named = {each.name: _filled(each, config, policy) for each in config.classes}
        self._rules = [(_wanted(rule), self._named[each.name]) for each in config.classes for rule in each.match]

    @property
    def names(self) -> Sequence[str]:
        """All classes."""
        return [_DEFAULT, *self._named]

    def classify(self, named: str | None, traits: Callable[[], Aspects]) -> Workload:
        """The class of a request.

        Args:
            named: What its header says; a name that is not configured means nothing.
            traits: Asked for only when there are rules.
        """
        if named is not None and (found := self._named.get(named)) is not None:
            return found
        if self._rules:
            seen = traits()
            for wanted, workload in self._rules:
                if all(look(seen) == value for look, value in wanted):
                    return workload
        return self.default


def _wanted(rule: MatchConfig) -> list[tuple[Callable[[Aspects], Any], Any]]:
    return [(_LOOKS[name], value) for name in _LOOKS if (value := getattr(rule, name)) is not None]


def _filled(each: ClassConfig, config: RoutingConfig, policy: Policy) -> Workload:
    return Workload(each.name, each.policy or policy, each.weights or config.weights, each.boundary, unique=each.unique)
