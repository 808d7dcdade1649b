"""This project's own router deciding for virtual engines: index, producers, scorers, picker and cost model, no HTTP.

Everything that a policy rests on is the router's own code: KV events go encoded through its decoder into its index,
facts come from its producer, seats are entered at its desks, and answers teach its cost model. Only sockets and the
tokenizer are left out, so a policy is judged in seconds, and the same way on every machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from kvduplex_bench.sim.core.engine import EngineCore
from kvduplex_bench.sim.core.sequence import Work
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_bench.sim.events import encode_batch
from kvduplex_bench.simulate.clockwork import Agenda, VirtualEngine
from kvduplex_bench.simulate.fleet import Outcome, Player
from kvduplex_bench.traces.model import Conversation, Trace
from kvduplex_router.config import BreakerConfig, Policy, RoutingConfig
from kvduplex_router.events.feed import Feed
from kvduplex_router.fleet.breaker import Breaker
from kvduplex_router.fleet.engine import Engine, EngineAddress, EngineHealth, EngineRole
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.fleet.traits import Load
from kvduplex_router.http.pool import Origin, Pool, Timeouts
from kvduplex_router.http.watchdog import Watchdog
from kvduplex_router.routing.admission import Admission, Seat
from kvduplex_router.routing.facts import Facts
from kvduplex_router.routing.picker import PickContext
from kvduplex_router.routing.rendezvous import key64
from kvduplex_router.routing.service import LOOK_S, RoutingService
from kvduplex_router.tokens.prompt import Prompt, TokenSource

__all__ = ["OWN", "RoutedFleet", "play_routed"]

OWN: Final = ("round_robin", "session", "prefix", "kv_events")
"""This router's policies for plain replicas."""

_POLL_S: Final = 2.0
_VOCABULARY: Final = 150_000


@dataclass(slots=True)
class _Member:
    engine: Engine
    virtual: VirtualEngine
    feed: Feed
    published: int = 0


class RoutedFleet:
    """Plain replicas behind the router's decisions.

    Args:
        timing: The engines.
        agenda: Their time, and the router's.
        replicas: How many engines.
        config: The router's ``routing`` section; its tokenizer is not used, for contents have names here.
    """

    def __init__(self, timing: Timing, agenda: Agenda, *, replicas: int, config: RoutingConfig) -> None:
        self._timing = timing
        self._agenda = agenda
        self._fleet = Fleet()
        self.routing = RoutingService(
            config, self._fleet, clock=lambda: agenda.now, soon=lambda act: agenda.at(agenda.now, act)
        )
        self._admission = Admission(self.routing.picker, queued=0, queue_s=0.0, reserve=self.routing.reserve)
        self._members = {member.engine.name: member for member in map(self._member, range(replicas))}
        self._tokens: dict[str, array[int]] = {}
        agenda.every(LOOK_S, self.routing.look)
        agenda.every(_POLL_S, self._poll)

    @property
    def cores(self) -> list[EngineCore]:
        """The engines' cores."""
        return [member.virtual.core for member in self._members.values()]

    @property
    def idle(self) -> bool:
        """Whether nothing is left in the router's figures of any engine."""
        desks = [self.routing.desks.of(member.engine) for member in self._members.values()]
        return not any(desk.serving_tokens or desk.pending for desk in desks)

    def serve(self, conversation: Conversation, index: int, work: Work, answered: Callable[[Outcome], None]) -> None:
        """Answer a turn; for `Player`."""
        work.tokens = tokens = self._written(conversation, index)
        prompt = Prompt(tokens[: work.prompt_tokens].tobytes(), source=TokenSource.GIVEN, model=self._timing.model)
        session = key64(b"id", b"", self._timing.model.encode(), conversation.id.encode())
        facts = self.routing.counted(prompt, session=session, named=conversation.kind)
        context = PickContext(facts=facts)
        engine = self.routing.picker.pick(self._fleet.replicas, context)
        assert engine is not None  # noqa: S101 - virtual engines are always usable and have no limit
        seat = self._admission.seated(engine, context)
        self._members[engine.name].virtual.submit(
            work, lambda work, ends: self._done(conversation, index, facts, seat, work, ends, answered),
            first=seat.first,
        )  # fmt: skip

    def _done(
        self, conversation: Conversation, index: int, facts: Facts, seat: Seat, work: Work, ends: float,
        answered: Callable[[Outcome], None],
    ) -> None:  # fmt: skip
        self.routing.answered(seat, facts, work.prompt_tokens, work.cached_tokens, work.output_tokens)
        seat.leave()
        if index + 1 == len(conversation.turns):
            del self._tokens[conversation.id]
        asked = work.arrived
        answered(
            Outcome(
                conversation.kind, asked, work.first_token_at - asked, ends - asked, work.prompt_tokens,
                work.cached_tokens, work.output_tokens, seat.reason,
            )
        )  # fmt: skip

    def _member(self, number: int) -> _Member:
        origin = Origin("http", f"10.0.0.{number + 1}", 8000)
        limits = BreakerConfig()
        engine = Engine(
            EngineAddress(origin.authority, EngineRole.REPLICA, origin, (origin.host,)),
            pool=Pool(origin, timeouts=Timeouts(), watchdog=Watchdog()),
            breaker=Breaker(failures=limits.failures, open_s=limits.open_s, clock=lambda: self._agenda.now),
        )
        engine.health = EngineHealth.UP
        self._fleet.join(engine)
        trust = self.routing.desks.of(engine).trust
        feed = Feed(engine.name, index=self.routing.index, trust=trust, clock=lambda: self._agenda.now, ask=None)
        virtual = VirtualEngine(self._timing, self._agenda, after_step=lambda: self._publish(engine))
        return _Member(engine, virtual, feed)

    def _publish(self, engine: Engine) -> None:
        member = self._members[engine.name]
        core = member.virtual.core
        if core.events:
            payload = encode_batch(core.events, self._timing.block_size)
            core.events.clear()
            member.feed.message([b"", member.published.to_bytes(8, "big"), payload])
            member.published += 1

    def _poll(self) -> None:
        for member in self._members.values():
            core = member.virtual.core
            usage = 1.0 - core.pool.free / core.pool.total
            member.engine.load = Load(core.scheduler.running, core.scheduler.waiting, usage, self._agenda.now)

    def _written(self, conversation: Conversation, index: int) -> array[int]:
        """Token ids of everything up to the end of a turn's answer; the list grows from turn to turn."""
        tokens = self._tokens.setdefault(conversation.id, array("I"))
        turn = conversation.turns[index]
        for segment in turn.new:
            tokens.frombytes(_ids(segment.key, segment.tokens))
        tokens.frombytes(_ids(f"{conversation.id} {index}", turn.output_tokens))
        return tokens


@lru_cache(maxsize=1024)
def _ids(key: str, tokens: int) -> bytes:
    """The token ids that a content's name stands for."""
    return np.random.default_rng(key64(key.encode())).integers(_VOCABULARY, size=tokens, dtype=np.uint32).tobytes()


def play_routed(
    trace: Trace, timing: Timing, *, replicas: int, rate: float, policy: str, clients: int = 0
) -> list[Outcome]:
    """Play a trace over plain replicas behind the router's own decisions.

    Args:
        trace: What to play.
        timing: The engines.
        replicas: How many.
        rate: Conversations a second.
        policy: One of `OWN`.
        clients: How many work off a closed trace, which has no rate.
    """
    agenda, config = Agenda(), RoutingConfig(policy=Policy(policy))
    fleet = RoutedFleet(timing, agenda, replicas=replicas, config=config)
    return Player(trace, rate, timing.block_size, agenda, fleet.serve, clients).run()
