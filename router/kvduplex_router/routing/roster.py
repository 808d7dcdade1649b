"""The engines that may be picked, with what many picks in a row have in common: who is idle, who ranks first for a key.

A fleet of a few is looked at anew for each pick. Of a large one a picture is kept for some milliseconds, in which the
router's own picks are the only changes that matter, and those are looked up where they matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from kvduplex_router.clock import Clock
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.routing.desk import Desk, Desks
from kvduplex_router.routing.rendezvous import SLACK, bounded, engine_seed, weights

__all__ = ["Roster", "Rosters"]

_FEW: Final = 24
_KEPT_S: Final = 0.02
_SHORTLIST: Final = 4
_CROWD_FACTOR: Final = 3
_CROWD_SLACK: Final = 8
_TOP: Final = 4


class Roster:
    """Usable engines of one candidate list, at one moment.

    Attributes:
        engines: In the order of the candidates.
        idle: Those that would be done first, the soonest first.
    """

    def __init__(self, engines: list[Engine], desks: Desks) -> None:
        self.engines = engines
        self._desks = desks
        self._in_flight = sum([engine.in_flight for engine in engines])
        of = desks.of
        waits = [
            0.0
            if not engine.in_flight and engine.load is None
            else (desk := of(engine)).wait_s(engine) + desk.slowdown_s
            for engine in engines
        ]
        order = sorted(range(len(engines)), key=waits.__getitem__)[:_SHORTLIST] if len(engines) > 1 else [0]
        self.idle = [engines[i] for i in order[: len(engines)]]

    def __len__(self) -> int:
        return len(self.engines)

    @cached_property
    def _seeds(self) -> npt.NDArray[np.uint64]:
        return np.array([engine_seed(engine.name) for engine in self.engines], np.uint64)

    @cached_property
    def _names(self) -> dict[str, Engine]:
        return {engine.name: engine for engine in self.engines}

    def find(self, name: str) -> Engine | None:
        """The engine of that name, if it may be picked."""
        return self._names.get(name)

    @property
    def crowd(self) -> float:
        """Requests at which an engine is too crowded to be sent more for what it holds, whatever its prices say.

        Prices are learned from streams; answers in one piece do not show when their prompt was computed.
        """
        return _CROWD_FACTOR * self._in_flight / len(self.engines) + _CROWD_SLACK

    def desk(self, engine: Engine) -> Desk:
        """Its desk."""
        return self._desks.of(engine)

    def preferred(self, key: int, factor: float) -> Engine | None:
        """The engine that a key is hashed to, passing over those with more than `factor` times the mean load."""
        if len(self.engines) <= _TOP:
            return bounded(key, self.engines, factor)
        ranks = weights(self._seeds, key)
        top = np.argpartition(ranks, -_TOP)[-_TOP:]
        limit = math.ceil(factor * (self._in_flight + 1) / len(self.engines)) + SLACK
        for i in top[np.argsort(ranks[top])[::-1]].tolist():
            engine: Engine = self.engines[i]
            if engine.in_flight < limit:
                return engine
        return bounded(key, self.engines, factor)


class Rosters:
    """Makes rosters, and keeps those of large fleets for a moment.

    Args:
        desks: Figures of the engines.
        clock: Monotonic seconds.
        saturated_kv: KV use from which an engine is passed over while others can serve.
        saturated_waiting: Requests waiting in it from which the same holds.
    """

    def __init__(self, desks: Desks, *, clock: Clock, saturated_kv: float, saturated_waiting: int) -> None:
        self._desks = desks
        self._clock = clock
        self._kv = saturated_kv
        self._waiting = saturated_waiting
        self._kept: dict[int, tuple[float, int, Sequence[Engine], Roster]] = {}

    def of(self, candidates: Sequence[Engine], excluded: frozenset[str]) -> Roster:
        """Usable candidates with a free place, without saturated ones unless all are."""
        if len(candidates) <= _FEW or excluded:
            return self._made(candidates, excluded)
        now = self._clock()
        kept = self._kept.get(id(candidates))
        if kept is not None and now < kept[0] and kept[1] == len(candidates) and kept[2] is candidates:
            return kept[3]
        roster = self._made(candidates, excluded)
        self._kept[id(candidates)] = (now + _KEPT_S, len(candidates), candidates, roster)
        return roster

    def forget(self) -> None:
        """Look again: an engine of a kept roster turned out not to be usable."""
        self._kept.clear()

    def _made(self, candidates: Sequence[Engine], excluded: frozenset[str]) -> Roster:
        usable = [engine for engine in candidates if engine.usable and engine.has_place]
        if excluded:
            usable = [engine for engine in usable if engine.name not in excluded]
        open_ = [engine for engine in usable if engine.load is None or not self._saturated(engine)]
        return Roster(open_ or usable, self._desks)

    def _saturated(self, engine: Engine) -> bool:
        load = engine.load
        if load is None:
            return False
        waiting, usage = load.waiting or 0, load.kv_usage or 0.0
        return waiting >= self._waiting or (usage >= self._kv and waiting > 0)
