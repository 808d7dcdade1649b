"""What renewal saves: a trace of agent sessions against the real lease table, without engines.

Both arms play the same trace and get the same chances of reuse. The fixed arm holds each turn's blocks until they are
read or `decoder_kv_blocks_ttl` has passed, as vLLM's own connector does. The renewing arm holds them for `lease_ttl_s`
and a router that renews what may still come back:

* the client's connection is open, or
* it gave no sign, and fewer than `patience` of the returns seen so far after an answer of that kind took this long.

The router learns of a closed connection, of the kind of answer and of earlier returns, never of the future. What is
compared is the blocks that were pinned, times the seconds they were, for the blocks that were reused.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer
from rich.table import Table

from kvduplex_bench.console import result_console
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.records import Grant, LeaseLimits
from kvduplex_transfer.leases.table import LeaseTable

__all__ = ["Arm", "Result", "Trace", "generate", "leases", "run"]

_BLOCK_TOKENS: Final = 32
_HOUR_S: Final = 3600.0
_HEARTBEAT_S: Final = 10.0
_LEASE_TTL_S: Final = 30.0
_FIXED_TTL_S: Final = 480.0
_FORGET_GAPS: Final = 5_000
_MOST_BURSTS: Final = 6
_COMES_BACK: Final = 0.25


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: how it came about, and how long its context is after the answer.

    Attributes:
        gap_s: Seconds since the answer before it.
        kind: ``tool`` when its answer calls a tool, ``answer`` when a person reads it.
        blocks: Full KV blocks of prompt and answer.
    """

    gap_s: float
    kind: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Session:
    """A run of turns.

    Attributes:
        start_s: When the first one begins.
        turns: In order.
        closes: Whether the client's end shows, as a closed connection.
    """

    start_s: float
    turns: tuple[Turn, ...]
    closes: bool


Trace = tuple[Session, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What one arm pinned and got.

    Attributes:
        pinned_block_s: Blocks pinned, each once, times seconds.
        reused_blocks: Blocks read by later turns.
        reusable_blocks: Blocks that an endless memory would have offered.
        peak_blocks: Most blocks pinned at once.
        renewals: Renewals sent.
    """

    pinned_block_s: float
    reused_blocks: int
    reusable_blocks: int
    peak_blocks: int
    renewals: int


def generate(sessions: int, seed: int, *, closing: float = 0.9) -> Trace:
    """Sessions of agents over some hours: bursts of tool calls seconds apart, each ending in an answer to a person.

    One person in four replies, after a minute in the middle and an hour at times, and a further burst begins.

    Args:
        sessions: How many.
        seed: Of the pseudo-random numbers.
        closing: Share of the clients whose end shows.
    """
    chance = random.Random(seed)
    span_s = max(_HOUR_S, sessions / 10_000 * 4 * _HOUR_S)
    return tuple(
        Session(chance.uniform(0, span_s), tuple(_turns(chance)), chance.random() < closing) for _ in range(sessions)
    )


def _turns(chance: random.Random) -> Iterator[Turn]:
    tokens = chance.lognormvariate(8.0, 0.7)  # system prompt, tools, task: 3,000 tokens in the middle
    gap_s = 0.0
    for burst in itertools.count():
        for _ in range(1 + int(chance.expovariate(1 / 6))):
            tokens += chance.lognormvariate(5.5, 1.0)
            yield Turn(gap_s, "tool", int(tokens) // _BLOCK_TOKENS)
            gap_s = min(chance.lognormvariate(1.1, 1.1), 400.0)  # a tool runs for 3 s in the middle
        tokens += chance.lognormvariate(5.5, 0.8)
        yield Turn(gap_s, "answer", int(tokens) // _BLOCK_TOKENS)
        if burst >= _MOST_BURSTS or chance.random() > _COMES_BACK:
            return
        gap_s = chance.lognormvariate(4.1, 1.2)  # reads and replies: a minute in the middle, an hour at times


class Gaps:
    """Returns seen so far, by kind of the answer before: what share of them took longer than some time."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {"tool": [], "answer": []}

    def add(self, kind: str, gap_s: float) -> None:
        """One more return."""
        seen = self._seen[kind]
        bisect.insort(seen, gap_s)
        if len(seen) > _FORGET_GAPS:
            del seen[random.Random(len(seen) * gap_s).randrange(len(seen))]

    def later_than(self, kind: str, waited_s: float) -> float:
        """Share of returns that took longer than `waited_s`; 1 while nothing was seen."""
        seen = self._seen[kind]
        return 1.0 if not seen else 1 - bisect.bisect_right(seen, waited_s) / len(seen)


@dataclass(frozen=True, slots=True)
class Arm:
    """How leases are kept: renewed for `ttl_s` each, or held for it once.

    Attributes:
        name: For people.
        renews: Whether a router renews.
        ttl_s: Life of a lease, or of a renewal.
        patience: A silent client is given up when fewer than this share of returns took longer.
    """

    name: str
    renews: bool
    ttl_s: float
    patience: float = 0.0


@dataclass(slots=True)
class _Play:
    """One arm playing a trace: the table, the clock, and what was pinned so far."""

    trace: Trace
    arm: Arm
    now: float = 0.0
    result: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("pinned", "reused", "reusable", "peak"), 0))
    renewals: int = 0
    gaps: Gaps = field(default_factory=Gaps)
    chains: dict[int, HashChain] = field(default_factory=dict)

    def run(self) -> Result:
        limits = LeaseLimits(
            budget_blocks=1 << 40, lease_ttl_s=_LEASE_TTL_S, max_ttl_s=_FIXED_TTL_S, claim_ttl_s=1.0, max_leases=1 << 30
        )
        table = LeaseTable(limits=limits, clock=lambda: self.now)
        events = [(session.start_s, number, 0, "turn") for number, session in enumerate(self.trace)]
        heapq.heapify(events)
        while events:
            when, number, turn, what = heapq.heappop(events)
            self._advance(table, when)
            following = self._turn(table, number, turn) if what == "turn" else self._renew(table, number, turn)
            for event in following:
                heapq.heappush(events, event)
        self._advance(table, self.now + _FIXED_TTL_S)
        result = self.result
        return Result(
            result["pinned"], int(result["reused"]), int(result["reusable"]), int(result["peak"]), self.renewals
        )

    def _advance(self, table: LeaseTable, when: float) -> None:
        """Move the clock in the steps in which leases end, adding up what was pinned meanwhile."""
        while self.now < when:
            step = min(table.seconds_to_next_end(), when - self.now)
            self.result["pinned"] += table.blocks_pinned * step
            self.now += step
            table.take_loose()
        self.result["peak"] = max(self.result["peak"], table.blocks_pinned)

    def _turn(self, table: LeaseTable, number: int, index: int) -> list[tuple[float, int, int, str]]:
        session = self.trace[number]
        turn = session.turns[index]
        if index == 0:
            self.chains[number] = _chain(number, session.turns[-1].blocks)
        chain = self.chains[number].prefix(turn.blocks)
        blocks = range(number << 20, (number << 20) + turn.blocks)
        if index:
            before = session.turns[index - 1]
            self.gaps.add(before.kind, turn.gap_s)
            self.result["reusable"] += before.blocks
            grant = table.claim((b"p", number), str(number), chain)
            if isinstance(grant, Grant):
                self.result["reused"] += len(grant.blocks)
                table.finish((b"p", number), consumed=True)
        table.hold(str(number), chain, blocks, self.arm.ttl_s)
        events = []
        if self.arm.renews:
            events.append((self.now + _HEARTBEAT_S, number, index, "renew"))
        if index + 1 < len(session.turns):
            events.append((self.now + session.turns[index + 1].gap_s, number, index + 1, "turn"))
            return events
        del self.chains[number]
        if self.arm.renews and session.closes:
            table.release([str(number)])
            return []
        return events

    def _renew(self, table: LeaseTable, number: int, index: int) -> list[tuple[float, int, int, str]]:
        """A heartbeat: it finds the turn it was set for answered by another one, given up, or worth another while."""
        session = self.trace[number]
        answered_at = session.start_s + sum(turn.gap_s for turn in session.turns[: index + 1])
        waited_s = self.now - answered_at
        connected = session.closes and index + 1 < len(session.turns)
        if not connected and self.gaps.later_than(session.turns[index].kind, waited_s) < self.arm.patience:
            table.release([str(number)])
            return []
        if waited_s >= _FIXED_TTL_S or self._has_moved_on(session, index, waited_s):
            return []
        self.renewals += len(table.renew([str(number)], self.arm.ttl_s))
        return [(self.now + _HEARTBEAT_S, number, index, "renew")]

    @staticmethod
    def _has_moved_on(session: Session, index: int, waited_s: float) -> bool:
        return index + 1 < len(session.turns) and session.turns[index + 1].gap_s <= waited_s


def _chain(session: int, blocks: int) -> HashChain:
    """Any chain does, as long as later turns of a session extend it and sessions differ."""
    seed = hashlib.sha256(str(session).encode()).digest()[:16]
    return HashChain(b"".join((int.from_bytes(seed) ^ n).to_bytes(16) for n in range(blocks)), 16)


def run(
    sessions: int = 10_000, seed: int = 1, *, closing: float = 0.9, patience: float = 0.02
) -> tuple[Result, Result]:
    """Play one trace with a fixed time and with renewals; returns both results in that order."""
    trace = generate(sessions, seed, closing=closing)
    fixed = Arm("fixed", renews=False, ttl_s=_FIXED_TTL_S)
    renewed = Arm("renewed", renews=True, ttl_s=_LEASE_TTL_S, patience=patience)
    return _Play(trace, fixed).run(), _Play(trace, renewed).run()


def leases(
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of the trace.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 1,
    closing: Annotated[
        float, typer.Option(min=0, max=1, help="Share of clients whose end shows as a closed connection.")
    ] = 0.9,
    patience: Annotated[
        float, typer.Option(min=0, max=1, help="Give a silent client up when fewer returns than this took longer.")
    ] = 0.02,
) -> None:
    """Compare leases that are renewed with blocks held for a fixed time, on a generated trace of agent sessions."""
    fixed, renewed = run(sessions, seed, closing=closing, patience=patience)
    table = Table("", "pinned block-seconds", "peak blocks", "reused", "of reusable", "renewals")
    for name, result in (("fixed 480 s", fixed), ("renewed 30 s", renewed)):
        table.add_row(
            name,
            f"{result.pinned_block_s:,.0f}",
            f"{result.peak_blocks:,}",
            f"{result.reused_blocks:,}",
            f"{result.reused_blocks / max(result.reusable_blocks, 1):.1%}",
            f"{result.renewals:,}",
        )
    console = result_console()
    console.print(table)
    per_fixed = fixed.pinned_block_s / max(fixed.reused_blocks, 1)
    per_renewed = renewed.pinned_block_s / max(renewed.reused_blocks, 1)
    console.print(
        f"Per reused block, renewal pins {per_fixed / max(per_renewed, 1e-9):.1f} times fewer block-seconds "
        f"({renewed.reused_blocks / max(fixed.reused_blocks, 1):.1%} of the fixed arm's reuse)."
    )
