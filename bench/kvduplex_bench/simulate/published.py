"""The published 1P1D experiment, simulated: what the profiles of its machines must reproduce.

Source: an AWS post on vLLM of October 2026. Two p5en.48xlarge over EFA, prefix caching off on the prefill engine; 10
conversations of 10 turns, 150 user and 300 answer tokens a turn behind a constant prefix, 2 clients, the first fifth of
the requests not counted.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass

import msgspec

from kvduplex_bench.sim.core.sequence import Work
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_bench.simulate.clockwork import Agenda
from kvduplex_bench.simulate.content import ContentChain
from kvduplex_bench.simulate.fleet import Outcome
from kvduplex_bench.simulate.pd import PdFleet, PdSettings
from kvduplex_bench.traces.model import Conversation, Segment, Turn

__all__ = ["PUBLISHED", "Point", "replay"]


@dataclass(frozen=True, slots=True)
class Point:
    """One published pair of times, in milliseconds.

    Attributes:
        profile: Timing profile of the machine.
        prefix: Tokens of the constant prefix.
        reuse: Whether KV was pulled back.
        ttft_ms: Time to first token.
        prefill_ms: Duration of the prefill.
    """

    profile: str
    prefix: int
    reuse: bool
    ttft_ms: float
    prefill_ms: float


PUBLISHED = (
    Point("qwen3-32b-p5en", 2_000, False, 158, 153),
    Point("qwen3-32b-p5en", 24_000, False, 778, 744),
    Point("qwen3-32b-p5en", 2_000, True, 122, 128),
    Point("qwen3-32b-p5en", 24_000, True, 460, 414),
    Point("glm-5-fp8-p5en", 2_000, False, 500, 500),
    Point("glm-5-fp8-p5en", 20_000, False, 2334, 2331),
    Point("glm-5-fp8-p5en", 2_000, True, 358, 316),
    Point("glm-5-fp8-p5en", 20_000, True, 702, 541),
)
"""What was published."""

_CONVERSATIONS, _TURNS, _USER, _ANSWER, _CLIENTS, _WARM_UP = 10, 10, 150, 300, 2, 0.2


def replay(timing: Timing, prefix: int, *, reuse: bool) -> tuple[float, float]:
    """Mean TTFT and prefill duration of the experiment in seconds, simulated.

    Args:
        timing: Both engines.
        prefix: Tokens of the constant prefix.
        reuse: Whether KV is pulled back.
    """
    agenda = Agenda()
    roomy = msgspec.structs.replace(timing, max_model_len=2**20)
    fleet = PdFleet(PdSettings(roomy, 1, 1, plan="pull" if reuse else "recompute", prefill_caching=False), agenda)
    outcomes: list[Outcome] = []
    for client in range(_CLIENTS):
        _Client(fleet, agenda, timing.block_size, prefix, client, outcomes).next()
    agenda.run()
    counted = slice(int(len(outcomes) * _WARM_UP), None)
    return (
        statistics.fmean(each.ttft_s for each in outcomes[counted]),
        statistics.fmean(seconds for _, seconds in fleet.prefill_times[counted]),
    )


class _Client:
    """Takes its conversations in turns, without a pause."""

    def __init__(
        self, fleet: PdFleet, agenda: Agenda, block_size: int, prefix: int, client: int, outcomes: list[Outcome]
    ) -> None:
        self._fleet = fleet
        self._agenda = agenda
        self._outcomes = outcomes
        self._prefix = prefix
        names = [f"{client}-{number}" for number in range(_CONVERSATIONS // _CLIENTS)]
        self._waiting = deque(
            (Conversation(name, "published", 0.0, tuple(itertools.repeat(Turn(0.0, (), _ANSWER), _TURNS))),
             ContentChain(block_size), 0)
            for name in names
        )  # fmt: skip

    def next(self) -> None:
        """Ask the next turn of the conversation that waited longest."""
        if not self._waiting:
            return
        conversation, chain, index = self._waiting.popleft()
        for segment in self._said(conversation.id, index):
            chain.add(segment.key, segment.tokens)
        prompt = chain.tokens
        chain.add(f"{conversation.id} answer {index}", _ANSWER)
        work = Work(f"{conversation.id}/{index}", prompt, _ANSWER, tuple(chain.hashes))

        def answered(outcome: Outcome) -> None:
            self._outcomes.append(outcome)
            if index + 1 < _TURNS:
                self._waiting.append((conversation, chain, index + 1))
            self._agenda.at(self._agenda.now, self.next)

        self._fleet.serve(conversation, index, work, answered)

    def _said(self, name: str, index: int) -> list[Segment]:
        question = Segment("user", f"{name} question {index}", _USER)
        return [question] if index else [Segment("system", f"{name} prefix", self._prefix), question]
