"""Fleets of virtual engines that play traces: plain replicas, or prefill and decode apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kvduplex_bench.sim.core.sequence import Work
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_bench.simulate.clockwork import Agenda, VirtualEngine
from kvduplex_bench.simulate.content import ContentChain
from kvduplex_bench.traces.model import Conversation, Trace

__all__ = ["POLICIES", "Outcome", "Pick", "Player", "play_replicas"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One turn.

    Attributes:
        kind: Workload class.
        asked: When it was sent.
        ttft_s: To its first token.
        e2e_s: To its last.
        prompt_tokens: Tokens of its prompt.
        cached_tokens: Of those, not computed.
        output_tokens: Tokens of its answer.
        plan: How it was served.
    """

    kind: str
    asked: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    plan: str = ""


Pick = Callable[[str, Work, Sequence[VirtualEngine]], VirtualEngine]
"""Chooses an engine for a conversation's request."""


def _round_robin() -> Pick:
    turn = itertools.count()
    return lambda _conversation, _work, engines: engines[next(turn) % len(engines)]


def _least() -> Pick:
    return lambda _conversation, _work, engines: min(engines, key=lambda engine: engine.in_flight)


def _session() -> Pick:
    def pick(conversation: str, _work: Work, engines: Sequence[VirtualEngine]) -> VirtualEngine:
        return engines[int.from_bytes(blake2b(conversation.encode(), digest_size=8).digest()) % len(engines)]

    return pick


def _overlap() -> Pick:
    """Seconds until the prompt is computed, as an all-knowing router would count them."""

    def pick(_conversation: str, work: Work, engines: Sequence[VirtualEngine]) -> VirtualEngine:
        def seconds(engine: VirtualEngine) -> float:
            timing = engine.core.timing
            held = len(engine.core.pool.match(work.hashes)) * timing.block_size
            left = max(1, work.prompt_tokens - held)
            return timing.prefill.per_token_s * left + timing.decode.step_s * engine.in_flight / 2

        return min(engines, key=seconds)

    return pick


POLICIES: dict[str, Callable[[], Pick]] = {
    "round_robin": _round_robin, "least": _least, "session": _session, "overlap": _overlap,
}  # fmt: skip
"""Policies of the simulation by name."""


Serve = Callable[[Conversation, int, Work, Callable[[Outcome], None]], None]


@dataclass(slots=True)
class Player:
    """Plays a trace on an agenda: each conversation's turns one after the other, with their gaps.

    Attributes:
        trace: What to play.
        rate: Conversations a second.
        block_size: Of the engines.
        agenda: The time.
        serve: Has a turn answered, and calls back.
        clients: How many work off a closed trace, each one conversation after the other.
        outcomes: Every turn, in order of their ends.
    """

    trace: Trace
    rate: float
    block_size: int
    agenda: Agenda
    serve: Serve
    clients: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    _left: Iterator[Conversation] = field(init=False)

    def run(self) -> list[Outcome]:
        """Play to the end.

        Raises:
            ValueError: The trace is closed and there are no clients.
        """
        self._left = iter(self.trace.conversations)
        if self.trace.closed:
            if self.clients < 1:
                raise ValueError(f"{self.trace.name} has no arrival times: say how many clients work it off")
            for _ in range(self.clients):
                self._next()
        else:
            for conversation in self._left:
                self._enter(conversation, conversation.start / self.rate)
        self.agenda.run()
        return self.outcomes

    def _next(self) -> None:
        if (conversation := next(self._left, None)) is not None:
            self._enter(conversation, self.agenda.now)

    def _enter(self, conversation: Conversation, when: float) -> None:
        self.agenda.at(when, lambda: self._turn(conversation, 0, ContentChain(self.block_size)))

    def _turn(self, conversation: Conversation, index: int, chain: ContentChain) -> None:
        turn = conversation.turns[index]
        for segment in turn.new:
            chain.add(segment.key, segment.tokens)
        prompt = chain.tokens
        chain.add(f"{conversation.id} {index}", turn.output_tokens)
        work = Work(f"{conversation.id}/{index}", prompt, turn.output_tokens, tuple(chain.hashes))

        def answered(outcome: Outcome) -> None:
            self.outcomes.append(outcome)
            if index + 1 < len(conversation.turns):
                gap_s = conversation.turns[index + 1].gap_s
                self.agenda.at(self.agenda.now + gap_s, lambda: self._turn(conversation, index + 1, chain))
            elif self.trace.closed:
                self._next()

        self.serve(conversation, index, work, answered)


def play_replicas(
    trace: Trace, timing: Timing, *, replicas: int, rate: float, policy: str | Callable[[], Pick], clients: int = 0
) -> list[Outcome]:
    """Play a trace over plain replicas.

    Args:
        trace: What to play.
        timing: The engines.
        replicas: How many.
        rate: Conversations a second.
        policy: One of `POLICIES`, or what makes another.
        clients: How many work off a closed trace, which has no rate.
    """
    agenda = Agenda()
    engines = [VirtualEngine(timing, agenda) for _ in range(replicas)]
    pick = (POLICIES[policy] if isinstance(policy, str) else policy)()

    def serve(conversation: Conversation, _index: int, work: Work, answered: Callable[[Outcome], None]) -> None:
        asked = agenda.now

        def done(work: Work, ends: float) -> None:
            answered(
                Outcome(
                    conversation.kind, asked, work.first_token_at - asked, ends - asked, work.prompt_tokens,
                    work.cached_tokens, work.output_tokens,
                )
            )  # fmt: skip

        pick(conversation.id, work, engines).submit(work, done)

    return Player(trace, rate, timing.block_size, agenda, serve, clients).run()
