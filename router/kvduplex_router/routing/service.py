"""Routing put together: what is known of engines, what is worked out of requests, and what is learned from answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from kvduplex_router.clock import Clock
from kvduplex_router.config import Policy, RoutingConfig
from kvduplex_router.events.index import BlockIndex
from kvduplex_router.events.service import Endpoints, EventService
from kvduplex_router.events.trust import Trust, TrustKeeper
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.routing.admission import Seat
from kvduplex_router.routing.desk import Desks, Reservation
from kvduplex_router.routing.facts import Facts
from kvduplex_router.routing.learned import LearnedPrefixes
from kvduplex_router.routing.picker import PickContext
from kvduplex_router.routing.policy import PolicyPicker
from kvduplex_router.routing.producer import FactProducer
from kvduplex_router.routing.report import Family, families
from kvduplex_router.routing.roster import Rosters
from kvduplex_router.tokens.files import load_files
from kvduplex_router.tokens.prompt import Prompt
from kvduplex_router.tokens.tokeniser import Tokeniser

__all__ = ["LOOK_S", "RoutingService"]

_log = logging.getLogger("kvduplex.router.routing")
_RECENT_TOKENS: Final = 262_144
_RECENT_ROUNDS: Final = 4  # prompts count as held for two to four seconds after they are computed, until events say so
LOOK_S: Final = 0.5
"""Seconds between calls of `RoutingService.look`."""


class RoutingService:
    """See the module; one a process.

    Args:
        config: The section.
        fleet: The engines.
        clock: Monotonic seconds.
        soon: Does something once what is going on is over; the event loop's own way when not given.

    Raises:
        ConfigError: The tokenizer cannot be read.

    Attributes:
        picks: Choices by class, policy and reason.
        predicted: Prompt tokens expected to be held where requests were sent.
        off: Of those, by how many the expectation missed, either way.
        miscounted: Requests whose prompt the engine counted otherwise.
    """

    def __init__(
        self,
        config: RoutingConfig,
        fleet: Fleet,
        *,
        clock: Clock,
        soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._clock = clock
        self._soon = soon or (lambda act: asyncio.get_running_loop().call_soon(act))
        limits = config.events
        self.desks = Desks(clock)
        self.index = BlockIndex(max_blocks=limits.max_blocks, max_engines=limits.max_engines)
        self.learned = LearnedPrefixes(
            max_units=limits.learned_units,
            max_engines=limits.max_engines,
            engine_tokens=limits.learned_engine_tokens,
        )
        self.recent = LearnedPrefixes(
            max_units=limits.learned_units, max_engines=limits.max_engines, engine_tokens=_RECENT_TOKENS
        )
        self.index.on_cleared = self._lost_all
        files = None if config.tokenizer is None else load_files(config.tokenizer)
        self.tokeniser = Tokeniser(files, cache_bytes=config.token_cache_bytes)
        rosters = Rosters(
            self.desks, clock=clock, saturated_kv=config.saturated_kv, saturated_waiting=config.saturated_waiting
        )
        self.picker = PolicyPicker(rosters, bounded_load=config.bounded_load)
        self._producer = FactProducer(
            config, tokeniser=self.tokeniser, index=self.index, learned=self.learned, recent=self.recent,
            desks=self.desks, disaggregated=lambda: self._fleet.disaggregated,
        )  # fmt: skip
        self._events = EventService(self.index, trust=self._trust, wanted=self._publishers, clock=clock)
        self._listens = config.uses(Policy.KV_EVENTS)
        self.facts = self._producer.facts
        self.picks: Counter[tuple[str, str, str]] = Counter()
        self.predicted = 0
        self.off = 0
        self.miscounted = 0
        self._rounds = itertools.count(1)
        self._seen: set[str] = set()

    @property
    def events(self) -> EventService:
        """The engines' events."""
        return self._events

    async def run(self) -> None:
        """Follow events and engines that come and go, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_forever())
            if self._listens:
                group.create_task(self._events.run())

    def looked_up(self, prompt: Prompt, *, session: int | None) -> Facts:
        """Facts of a prompt of no class, as if a request had come with it."""
        return self._producer.looked_up(self._producer.default, prompt, session)

    def counted(self, prompt: Prompt, *, session: int | None, named: str | None) -> Facts:
        """Facts of a prompt of the class that a header would name, as if a request had come with it."""
        return self._producer.counted(prompt, session, named)

    def reserve(self, engine: Engine, context: PickContext) -> Reservation | None:
        """A request was given to an engine: from now on it counts there, and its prompt is taken to be held there."""
        facts = context.facts
        if facts is None:
            return None
        choice = context.chosen
        if choice is not None:
            self.picks[facts.workload.name, facts.workload.policy.value, choice.reason.value] += 1
        if facts.prompt is None:
            return None
        overlap = max(facts.overlaps.get(engine.name, 0), facts.pullable)
        units = facts.units if facts.workload.policy is Policy.KV_EVENTS else ()
        reservation = Reservation(
            self.desks.of(engine), engine, max(0, facts.tokens - overlap), facts.pullable, facts.tokens, self._clock,
            units,
        )  # fmt: skip
        self._remember_soon(engine, facts)
        return reservation

    def _remember_soon(self, engine: Engine, facts: Facts) -> None:
        """Remember what was sent where, once it has been sent: nothing before that depends on it."""
        if facts.units:
            self._soon(lambda: self._remember(engine.name, facts))

    def _lost_all(self, engine: str) -> None:
        """An engine cleared its cache, began anew or is gone: what was sent there before is no longer held."""
        self.learned.forget(engine)
        self.recent.forget(engine)

    def _remember(self, engine: str, facts: Facts) -> None:
        self.learned.sent(engine, facts.units)
        if facts.workload.policy is Policy.KV_EVENTS:
            self.recent.sent(engine, facts.units)

    def work(self, seat: Seat, facts: Facts | None, *, held: int | None) -> None:
        """A decode engine is given a turn: enter what it has to do into its figures.

        Args:
            seat: Where.
            facts: The request's.
            held: Prompt tokens it holds, when it computes the rest itself; None when it reads what was computed.
        """
        if facts is None or facts.prompt is None:
            return
        computed, read = (1, facts.tokens) if held is None else (max(1, facts.tokens - held), 0)
        desk = self.desks.of(seat.engine)
        seat.reservation = Reservation(desk, seat.engine, computed, read, facts.tokens, self._clock)
        self._remember_soon(seat.engine, facts)

    def answered(
        self, seat: Seat, facts: Facts | None, prompt: int | None, cached: int | None, generated: int | None = None
    ) -> None:
        """A prompt was computed: learn from how long it took, and from what the engine says it held.

        Args:
            seat: Where.
            facts: The request's.
            prompt: Prompt tokens as the engine counted them; None when it did not say.
            cached: Of those, tokens that it did not compute; None when it did not say.
            generated: Tokens of the answer, where this engine has just ended it; None when it did not say.
        """
        seat.learn(prompt, cached, generated)
        if facts is not None:
            self._reported(seat.engine, facts, prompt, cached)

    def _reported(self, engine: Engine, facts: Facts, prompt: int | None, cached: int | None) -> None:
        """What is believed of an engine is set right by what it says."""
        if prompt is None or cached is None or facts.prompt is None or facts.pullable:
            return  # a prompt that was read from another engine says nothing about what this one held
        predicted = facts.overlaps.get(engine.name, 0)
        self.predicted += predicted
        if facts.prompt.exact and facts.prompt.count != prompt:
            self._count_differs(facts.prompt.count, prompt)
        self.off += abs(predicted - cached)
        desk = self.desks.of(engine)
        desk.remember(facts.remembered.get(engine.name, 0), cached)
        if facts.prompt.exact and facts.workload.policy is Policy.KV_EVENTS and desk.trust.judge(
            predicted, cached, prompt
        ):  # fmt: skip
            self._events.distrust(engine.name)

    def look(self) -> None:
        """What is to be done every `LOOK_S` seconds: see who can be believed, and drop what is known of who left.

        Twice gone in a row, so that an engine that comes back keeps it.
        """
        self.desks.judge(self._fleet.engines)
        if next(self._rounds) % _RECENT_ROUNDS == 0:
            self._age()
        now = {engine.name for engine in self._fleet.engines}
        for name in self._seen - now:
            self._lost_all(name)
        self.desks.keep_only(now)
        self._seen = now

    def _age(self) -> None:
        """Events of prompts come once they are computed, so what was sent long ago and is not yet is not forgotten."""
        self.recent.age()
        for engine in self._fleet.engines:
            for units in self.desks.of(engine).uncomputed():
                self.recent.sent(engine.name, units)

    def engine_names(self) -> list[str]:
        """All engines."""
        return [engine.name for engine in self._fleet.engines]

    def families(self) -> Iterator[Family]:
        """For metrics."""
        return families(self)

    def trust(self, engine: str) -> Trust:
        """How far an engine's events are believed."""
        desk = self.desks.find(engine)
        return Trust.SILENT if desk is None else desk.trust.state

    def _count_differs(self, here: int, there: int) -> None:
        self.miscounted += 1
        if self.miscounted == 1:
            _log.warning(
                "a prompt has %d tokens by the router's tokenizer and %d by the engine's: tokenizer or chat template "
                "differ, so blocks cannot be compared; give the served model's folder as routing.tokenizer",
                here,
                there,
            )

    def _trust(self, name: str) -> TrustKeeper:
        engine = self._fleet.find(name)
        assert engine is not None  # noqa: S101 - `_publishers` lists engines of the fleet
        return self.desks.of(engine).trust

    def _publishers(self) -> dict[str, Endpoints]:
        return {
            engine.name: (engine.address.kv_events, engine.address.kv_replay, engine.address.dp_index)
            for engine in self._fleet.engines
            if engine.address.kv_events is not None
        }

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()
