"""Picks an engine for a request by its class's policy.

Scoring every engine of a large fleet is not needed to find the best: engines that hold nothing of the prompt and that
no key prefers differ in their load alone, so of those the idlest are enough.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Final

from kvduplex_router.config import Policy
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.routing.facts import Facts
from kvduplex_router.routing.picker import Choice, LeastInFlight, PickContext, Reason
from kvduplex_router.routing.roster import Roster, Rosters
from kvduplex_router.routing.scorers import View, total

__all__ = ["PolicyPicker"]

_HOLDERS: Final = 8


class PolicyPicker:
    """A `kvduplex_router.routing.picker.Picker` for all policies.

    Args:
        rosters: Makes lists of usable engines.
        bounded_load: How much more than the mean load a session's engine may have.
    """

    def __init__(self, rosters: Rosters, *, bounded_load: float) -> None:
        self._rosters = rosters
        self._bounded_load = bounded_load
        self._turns = itertools.count()
        self._picks = itertools.count(1)
        self._least = LeastInFlight(self._picks)

    def pick(self, candidates: Sequence[Engine], context: PickContext) -> Engine | None:
        """See `Picker.pick`."""
        facts = context.facts
        if facts is None or facts.workload.policy is Policy.LEAST_IN_FLIGHT:
            return self._least.pick(candidates, context)
        choice = self.choose(candidates, facts, context.excluded)
        context.chosen = choice
        if choice is None:
            return None
        choice.engine.picked = next(self._picks)
        return choice.engine

    def choose(self, candidates: Sequence[Engine], facts: Facts, excluded: frozenset[str]) -> Choice | None:
        """The engine for a request; None when none is usable."""
        for _ in range(2):
            roster = self._rosters.of(candidates, excluded)
            choice = self._chosen(roster, facts) if len(roster) else None
            if choice is None or (choice.engine.usable and choice.engine.has_place):
                return choice
            self._rosters.forget()
        return None

    def _chosen(self, roster: Roster, facts: Facts) -> Choice:
        policy = facts.workload.policy
        if policy is Policy.ROUND_ROBIN:
            return Choice(roster.engines[next(self._turns) % len(roster)], Reason.ROUND_ROBIN)
        if policy is Policy.SESSION:
            engine = None if facts.session is None else roster.preferred(facts.session, self._bounded_load)
            return Choice(roster.idle[0], Reason.LOAD) if engine is None else Choice(engine, Reason.SESSION)
        return self._scored(roster, facts)

    def _scored(self, roster: Roster, facts: Facts) -> Choice:
        session = None if facts.session is None else roster.preferred(facts.session, self._bounded_load)
        home = None if facts.home is None else roster.preferred(facts.home, self._bounded_load)
        holders = _holders(roster, facts)
        shortlist = dict.fromkeys((*holders, *roster.idle))
        shortlist.update(dict.fromkeys(engine for engine in (session, home) if engine is not None))
        found = _ranked(list(shortlist), roster, facts, session, home)
        best = found[0]
        overlap = facts.overlaps.get(best.name, 0)
        runner_up = found[1] if len(found) > 1 else None
        return Choice(best, _reason(best, overlap, facts, session, home), overlap, runner_up)


def _holders(roster: Roster, facts: Facts) -> list[Engine]:
    """Engines that hold part of the prompt and are not crowded.

    Of many those that hold most, and of equals those with least to do.
    """
    crowd = roster.crowd
    found = [e for name in facts.overlaps if (e := roster.find(name)) is not None and e.in_flight < crowd]
    if len(found) > _HOLDERS:
        overlaps = facts.overlaps
        found = heapq.nsmallest(_HOLDERS, found, key=lambda engine: (-overlaps[engine.name], engine.in_flight))
    return found


def _ranked(
    engines: list[Engine], roster: Roster, facts: Facts, session: Engine | None, home: Engine | None
) -> list[Engine]:
    """Engines by score; of equals the one with fewer requests, then the one picked longest ago."""
    tokens = max(1, facts.tokens)
    figures = [
        (engine, (desk := roster.desk(engine)).wait_s(engine) + desk.slowdown_s, desk.prices.per_token)
        for engine in engines
    ]
    fastest = min([per_token for _, _, per_token in figures])
    scale = 1e-9 + max([wait + tokens * per_token for _, wait, per_token in figures])
    weights, held, pullable = facts.workload.weights, facts.overlaps.get, facts.pullable
    scored: list[tuple[float, int, int, int]] = []
    for place, (engine, wait, per_token) in enumerate(figures):
        overlap_s = max(held(engine.name, 0), pullable) * per_token
        view = View(overlap_s, wait + tokens * (per_token - fastest), engine is session, engine is home, scale)
        scored.append((-total(view, weights), engine.in_flight, engine.picked, place))
    scored.sort()
    return [engines[place] for *_, place in scored]


def _reason(best: Engine, overlap: int, facts: Facts, session: Engine | None, home: Engine | None) -> Reason:
    most = max(facts.overlaps.values(), default=0)
    if most > overlap + max(64, facts.tokens // 10):
        return Reason.SPILL
    if overlap:
        return Reason.OVERLAP
    if best is session:
        return Reason.SESSION
    return Reason.HOME if best is home else Reason.LOAD
