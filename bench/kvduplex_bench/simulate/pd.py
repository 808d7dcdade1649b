"""Prefill and decode apart, in virtual time: hops, claims, leases and their renewal, by the real lease table."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvduplex_bench.sim.core.sequence import Load, LoadEnd, Work
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_bench.simulate.clockwork import Agenda, VirtualEngine
from kvduplex_bench.simulate.fleet import Outcome
from kvduplex_bench.traces.model import Conversation
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.params import Retention
from kvduplex_transfer.leases.records import Grant, LeaseLimits

__all__ = ["Leasing", "PdFleet", "PdSettings", "Plan"]

_READER_WAITS_S: Final = 480.0

Plan = str
"""``pull``, ``recompute``, ``continue``, or ``cheapest``, which continues short suffixes and pulls the rest."""


@dataclass(frozen=True, slots=True)
class Leasing:
    """How decode engines keep blocks.

    Attributes:
        ttl_s: Life of a lease, or of a renewal.
        renews: Seconds between renewals; 0 renews nothing.
        longest_s: Longest life whatever the renewals.
        closing: Share of conversations whose end shows, so that their lease is released at once.
    """

    ttl_s: float = 480.0
    renews: float = 0.0
    longest_s: float = 480.0
    closing: float = 0.9


@dataclass(frozen=True, slots=True)
class PdSettings:
    """A fleet and how it is used.

    Attributes:
        timing: Prefill engines.
        decode_timing: Decode engines; as `timing` when not given.
        prefill: Prefill engines.
        decode: Decode engines.
        plan: How turns are served.
        threshold: Fewest tokens worth pulling.
        budget: Share of a decode engine's blocks that leases may pin.
        prefill_caching: Whether prefill engines have a prefix cache.
        leasing: How blocks are kept.
        continue_tokens: Longest suffix that ``cheapest`` lets a decode engine compute.
    """

    timing: Timing
    prefill: int
    decode: int
    plan: Plan = "pull"
    decode_timing: Timing | None = None
    threshold: int = 64
    budget: float = 0.5
    prefill_caching: bool = True
    leasing: Leasing = field(default_factory=Leasing)
    continue_tokens: int = 256


@dataclass(slots=True)
class _Turn:
    conversation: Conversation
    index: int
    whole: Work
    asked: float
    answered: Callable[[Outcome], None]
    decode: VirtualEngine
    cached: int = 0
    plan: str = ""
    prefill_s: float = 0.0


class PdFleet:
    """Engines and the router between them.

    Args:
        settings: The fleet.
        agenda: Its time.
    """

    def __init__(self, settings: PdSettings, agenda: Agenda) -> None:
        self._settings = settings
        self._agenda = agenda
        self._numbers = itertools.count()
        self._holder: dict[str, VirtualEngine] = {}
        decode_timing = settings.decode_timing or settings.timing
        limits = LeaseLimits(
            budget_blocks=int(decode_timing.kv_blocks * settings.budget), lease_ttl_s=settings.leasing.ttl_s,
            max_ttl_s=settings.leasing.longest_s, max_leases=1 << 30, max_claims=1 << 20,
        )  # fmt: skip
        self.prefill = [
            VirtualEngine(settings.timing, agenda, caching=settings.prefill_caching) for _ in range(settings.prefill)
        ]
        self.decode = [VirtualEngine(decode_timing, agenda, leases=limits) for _ in range(settings.decode)]
        self.prefill_times: list[tuple[str, float]] = []
        """Plan and duration of every prefill hop."""

    def serve(self, conversation: Conversation, index: int, whole: Work, answered: Callable[[Outcome], None]) -> None:
        """Answer a turn; for `Player`."""
        decode = self._holder.get(conversation.id) or min(self.decode, key=lambda engine: engine.in_flight)
        self._holder[conversation.id] = decode
        turn = _Turn(conversation, index, whole, self._agenda.now, answered, decode)
        held = self._held(turn)
        turn.plan = self._plan(turn, held)
        if turn.plan == "continue":
            self._answer(turn, None)
        else:
            self._compute(turn)

    def _plan(self, turn: _Turn, held: int) -> str:
        wanted = self._settings.plan
        if wanted == "cheapest":
            suffix = turn.whole.prompt_tokens - held
            wanted = "continue" if held and suffix <= self._settings.continue_tokens else "pull"
        if wanted == "continue" and not held:
            wanted = "recompute"
        return wanted

    def _held(self, turn: _Turn) -> int:
        """Tokens of the prompt that the decode engine's cache has."""
        if not turn.index:
            return 0
        core = turn.decode.core
        return len(core.pool.match(turn.whole.hashes[: self._prompt_blocks(turn)])) * core.timing.block_size

    def _prompt_blocks(self, turn: _Turn) -> int:
        return turn.whole.prompt_tokens // self._settings.timing.block_size

    def _compute(self, turn: _Turn) -> None:
        """The prefill hop."""
        hashes = turn.whole.hashes[: self._prompt_blocks(turn)]
        work = Work(f"{turn.whole.id}-p", turn.whole.prompt_tokens, 1, hashes)
        if turn.plan == "pull" and turn.index:
            work.load = self._claim(turn, work)
        if work.load is None and turn.plan == "pull":
            turn.plan = "recompute"
        engine = min(self.prefill, key=lambda each: self._seconds(each, work))

        def done(work: Work, _ends: float) -> None:
            turn.cached = work.cached_tokens
            turn.prefill_s = self._agenda.now - turn.asked
            self.prefill_times.append((turn.plan, turn.prefill_s))
            self._answer(turn, Load(
                turn.whole.prompt_tokens, self._settings.timing.forward.seconds,
                ended=lambda _end: engine.core.read_done(work.id),
            ))  # fmt: skip

        engine.submit(work, done, send_s=_READER_WAITS_S)

    def _seconds(self, engine: VirtualEngine, work: Work) -> float:
        core = engine.core
        held = len(core.pool.match(work.hashes)) * core.timing.block_size
        missing = 0 if work.load is None else work.load.tokens - held
        pulled = missing if missing >= max(self._settings.threshold, 1) else 0
        own = core.timing.prefill.per_token_s * (work.prompt_tokens - held - pulled)
        moving = core.timing.back.seconds(pulled)
        return own + moving + core.scheduler.waiting * 0.05 + engine.in_flight * core.timing.prefill.step_s

    def _claim(self, turn: _Turn, work: Work) -> Load | None:
        table, size = turn.decode.core.table, self._settings.timing.block_size
        if not work.hashes:
            return None
        key = (b"p", next(self._numbers))
        grant = table.claim(key, turn.conversation.id, HashChain.of(work.hashes))
        if not isinstance(grant, Grant):
            return None

        def ended(end: LoadEnd) -> None:
            table.finish(key, consumed=end is LoadEnd.READ)

        reuse = self._settings.timing.reuse
        return Load(
            len(grant.blocks) * size, self._settings.timing.back.seconds, least_tokens=self._settings.threshold,
            reuse_s=lambda tokens: reuse.step_s + reuse.per_token_s * tokens, ended=ended,
        )  # fmt: skip

    def _answer(self, turn: _Turn, load: Load | None) -> None:
        """The decode hop, or the only one."""
        work = turn.whole
        work.load = load
        keeps = self._settings.plan != "recompute"
        retention = Retention(turn.conversation.id, self._settings.leasing.ttl_s) if keeps else None
        turn.decode.submit(work, lambda work, ends: self._answered(turn, work, ends), retention=retention)

    def _answered(self, turn: _Turn, work: Work, ends: float) -> None:
        cached = work.cached_tokens if turn.plan == "continue" else turn.cached
        self._keep(turn)
        turn.answered(
            Outcome(
                turn.conversation.kind, turn.asked, work.first_token_at - turn.asked, ends - turn.asked,
                work.prompt_tokens, cached, work.output_tokens, turn.plan,
            )
        )  # fmt: skip

    def _keep(self, turn: _Turn) -> None:
        leasing, conversation = self._settings.leasing, turn.conversation
        if turn.index + 1 == len(conversation.turns):
            self._holder.pop(conversation.id, None)
            if leasing.renews and _share(conversation.id) < leasing.closing:
                turn.decode.core.table.release([conversation.id])
        elif leasing.renews:
            self._agenda.at(self._agenda.now + leasing.renews, lambda: self._renew(turn))

    def _renew(self, turn: _Turn) -> None:
        table, leasing = turn.decode.core.table, self._settings.leasing
        if table.renew([turn.conversation.id], leasing.ttl_s):
            self._agenda.at(self._agenda.now + leasing.renews, lambda: self._renew(turn))


def _share(name: str) -> float:
    """A number from 0 to 1 that a name always gives."""
    return (sum(name.encode()) * 2654435761 % 2**32) / 2**32
