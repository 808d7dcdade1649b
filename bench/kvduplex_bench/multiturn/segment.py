"""One segment: one arm at one point of the sweep, once. Warm-up, then the measured turns between two metric reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvduplex_bench.multiturn.corpus import Corpus
from kvduplex_bench.multiturn.engines import Counted
from kvduplex_bench.multiturn.exact import COMPARED_TOKENS, LOGPROB_MEMBERS, Comparison, compare
from kvduplex_bench.multiturn.player import Conversation, Player, Turn
from kvduplex_bench.multiturn.target import Client, Served, Target
from kvduplex_bench.multiturn.workload import Arm, Workload

__all__ = ["Clients", "Point", "Segment", "play_segment"]


@dataclass(frozen=True, slots=True)
class Point:
    """Which segment.

    Attributes:
        setting: Of the cluster.
        arm: What happens to histories.
        prefix_tokens: Length of the constant prefix.
        repeat: Number of the repeat, from 0.
    """

    setting: str
    arm: Arm
    prefix_tokens: int
    repeat: int

    @property
    def key(self) -> str:
        """Names the segment in the record, and its texts."""
        return f"{self.setting}/{self.arm}/{self.prefix_tokens}/{self.repeat}"

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {"segment": self.key, "setting": self.setting, "arm": str(self.arm)} | {
            "prefix_tokens": self.prefix_tokens,
            "repeat": self.repeat,
        }


@dataclass(frozen=True, slots=True)
class Clients:
    """Connections of a segment: its router, the first prefill engine and the reference, where there are such."""

    router: Client
    prefill: Client | None
    reference: Client | None


@dataclass(slots=True)
class Segment:
    """What was measured.

    Attributes:
        turns: Measured turns, failed ones too.
        warm_up: Turns that do not count.
        counted: From the engines; None when none are known.
        wall_s: Time of the measured turns.
        client_cpu_s: CPU that this program took for them.
        comparison: Of one more turn with a plain engine; None when that was not asked for.
    """

    turns: list[Turn] = field(default_factory=list)
    warm_up: list[Turn] = field(default_factory=list)
    counted: Counted | None = None
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    comparison: Comparison | None = None

    def as_json(self) -> dict[str, Any]:
        """All but the turns, for the record."""
        failed = sum(turn.reply is None for turn in (*self.turns, *self.warm_up))
        return {
            "wall_s": round(self.wall_s, 4),
            "client_cpu_s": round(self.client_cpu_s, 4),
            "errors": failed,
            "counted": self.counted.as_json() if self.counted else None,
            "compared": None
            if self.comparison is None
            else {
                "verdict": str(self.comparison.verdict),
                "tokens": self.comparison.tokens,
                "worst_logprob": self.comparison.worst,
            },
        }


class _Runner:
    def __init__(self, workload: Workload, target: Target, point: Point, clients: Clients, served: Served) -> None:
        self._workload, self._target, self._point = workload, target, point
        self._clients, self._served = clients, served
        self._corpus = Corpus(workload.seed, served.tokens_per_word)
        self.found = Segment()
        self._measuring = False
        fresh = target.fresh_ids and point.arm in {Arm.OFF, Arm.FLOOR}
        self._player = Player(
            workload=workload,
            client=clients.router,
            corpus=self._corpus,
            model=served.name,
            fresh_ids=fresh,
            told=self._told,
        )

    def _told(self, turn: Turn) -> None:
        (self.found.turns if self._measuring else self.found.warm_up).append(turn)

    async def run(self, *, check: bool) -> Segment:
        everyone = self._conversations()
        warm, turns = self._workload.warm_up_turns, self._workload.turns
        for first in range(0, len(everyone), self._workload.active):
            wave = everyone[first : first + self._workload.active]
            await self._player.play(wave, range(warm))
            for part in self._parts(range(warm, turns)):
                await self._measure(wave, part)
        if check and not everyone[0].failed:
            self.found.comparison = await self._compare(everyone[0])
        return self.found

    def _conversations(self) -> list[Conversation]:
        keys = [f"{self._point.key}/{number}" for number in range(self._workload.conversations)]
        return [Conversation(key, self._prefix(key)) for key in keys]

    def _prefix(self, key: str) -> str:
        tokens = self._point.prefix_tokens
        if not tokens:
            return ""
        return self._corpus.text(f"prefix/{tokens}" + ("" if self._workload.shared_prefix else f"/{key}"), tokens)

    def _parts(self, turns: range) -> Sequence[range]:
        """``floor`` fills the prefill engine's cache before every turn, apart from what is counted."""
        return [range(turn, turn + 1) for turn in turns] if self._point.arm is Arm.FLOOR else [turns]

    async def _measure(self, wave: Sequence[Conversation], turns: range) -> None:
        if self._point.arm is Arm.FLOOR:
            await self._fill(wave)
        before = await self._target.engines.read() if self._target.engines.known else None
        self._measuring = True
        began, cpu = time.perf_counter(), time.process_time()
        answered = await self._player.play(wave, turns)
        self.found.wall_s += time.perf_counter() - began
        self.found.client_cpu_s += time.process_time() - cpu
        self._measuring = False
        complete = answered == len(wave) * len(turns)
        if before is not None and complete and self._point.arm is not Arm.CONTINUE:
            counted = await self._target.engines.since(before, answered)
            self.found.counted = (self.found.counted or Counted()) + counted

    async def _fill(self, wave: Sequence[Conversation]) -> None:
        """Have the prefill engine compute each history, the last answer included, into its own cache.

        It may answer before it counts, and must not count later among the measured turns.
        """
        prefill = self._clients.prefill
        if prefill is None:
            return
        before = await self._target.engines.read()
        open_ones = [conversation for conversation in wave if not conversation.failed]
        for conversation in open_ones:
            await prefill.whole(self._served.name, conversation.messages, answer_tokens=1)
        await self._target.engines.since(before, len(open_ones))

    async def _compare(self, conversation: Conversation) -> Comparison | None:
        """One more turn, through the router and on the reference engine."""
        if self._clients.reference is None:
            return None
        turn = self._workload.turns
        self._player.ask(conversation, turn)
        name, tokens = self._served.name, COMPARED_TOKENS
        more = dict(LOGPROB_MEMBERS)
        given = {"conversation": self._player.conversation_id(conversation, turn)}
        answer = await self._clients.router.whole(name, conversation.messages, answer_tokens=tokens, **more, **given)
        reference = await self._clients.reference.whole(name, conversation.messages, answer_tokens=tokens, **more)
        return compare(answer, reference)


async def play_segment(
    workload: Workload,
    target: Target,
    point: Point,
    *,
    clients: Clients,
    served: Served,
    check: bool,
) -> Segment:
    """Play one segment.

    Args:
        workload: What to play.
        target: The cluster.
        point: Arm and point of the sweep.
        clients: Connections.
        served: The model.
        check: Compare one more turn with the reference engine.

    Raises:
        BenchError: The cluster is gone, or turn after turn fails.
    """
    return await _Runner(workload, target, point, clients, served).run(check=check)
