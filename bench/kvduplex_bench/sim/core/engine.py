"""A simulated engine without its interfaces: scheduler, blocks, leases, and blocks kept for a reader.

Pure: time comes in with each call. The lease table is the one that real decode engines use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvduplex_bench.sim.core.blocks import BlockPool
from kvduplex_bench.sim.core.scheduler import Scheduler, Step
from kvduplex_bench.sim.core.sequence import Phase, Work
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.params import Retention
from kvduplex_transfer.leases.records import LeaseLimits
from kvduplex_transfer.leases.table import LeaseTable

__all__ = ["Counts", "EngineCore", "Removed", "Stored"]

_MIN_LEASED_HASHES: Final = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that can be found from now on: those of `work` from `start` to `end`."""

    work: Work
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Hashes that are not found any more."""

    hashes: list[bytes]


@dataclass(slots=True)
class Counts:
    """What an engine has done so far.

    Attributes:
        prompt_tokens: Tokens of prompts it started on.
        local_hits: Of those, found in its own cache.
        external: Of those, read from another engine.
        generated: Tokens generated.
        finished: Requests that ended well.
        aborted: Requests whose client left.
        busy_s: Seconds in steps.
    """

    prompt_tokens: int = 0
    local_hits: int = 0
    external: int = 0
    generated: int = 0
    finished: int = 0
    aborted: int = 0
    busy_s: float = 0.0


class EngineCore:
    """One engine.

    Args:
        timing: How long things take.
        clock: Monotonic seconds, for leases.
        caching: Whether its prefix cache is on.
        leases: Bounds of its lease table.
        recording: Keep `events` for a publisher.
    """

    def __init__(
        self,
        timing: Timing,
        *,
        clock: Callable[[], float],
        caching: bool = True,
        leases: LeaseLimits | None = None,
        recording: bool = False,
    ) -> None:
        self.timing = timing
        self.counts = Counts()
        self.events: list[Stored | Removed] = []
        self.pool = BlockPool(timing.kv_blocks, caching=caching, removed=self._removed)
        self.table = LeaseTable(limits=leases or LeaseLimits(budget_blocks=timing.kv_blocks // 2), clock=clock)
        self.scheduler = Scheduler(timing, self.pool, make_room=self._make_room, stored=self._stored)
        self._recording = recording
        self._sends: OrderedDict[str, tuple[float, list[int], int]] = OrderedDict()
        self._retentions: dict[Work, tuple[Retention | None, float | None]] = {}

    def submit(self, work: Work, *, retention: Retention | None = None, send_s: float | None = None) -> None:
        """Take in a request.

        Args:
            work: The request.
            retention: What is kept of it under a lease when it ends.
            send_s: Seconds its blocks are kept for a reader when it ends.
        """
        self._retentions[work] = (retention, send_s)
        self.scheduler.add(work)

    def abort(self, work: Work) -> None:
        """The client left. What was generated may be kept all the same."""
        retention, _ = self._retentions.pop(work, (None, None))
        if work.phase in (Phase.FINISHED, Phase.ABORTED):
            return
        generated = work.generated(self.scheduler.step_number) if work.phase is Phase.DECODE else 0
        if generated and retention is not None:
            self._hold(work, retention, work.prompt_tokens + generated - 1)
        self.counts.aborted += 1
        self.counts.generated += generated
        self.scheduler.abort(work)

    def begin(self, now: float, longest: int = 1) -> Step | None:
        """Plan what comes next; None when nothing is to be done before `scheduler.next_load`."""
        self._expire_sends(now)
        self.collect()
        return self.scheduler.begin(now, longest)

    def end(self, step: Step) -> Step:
        """`step` is over: fill in what it brought, keep what is to be kept, and return it."""
        self.scheduler.end(step)
        self.counts.busy_s += step.ends - step.began
        for work in step.first:
            self.counts.prompt_tokens += work.prompt_tokens
            self.counts.local_hits += work.local_hits
            self.counts.external += work.external
        for work in step.finished:
            self._keep(work, step.ends)
        return step

    def readable(self, request: str, now: float) -> int | None:
        """Tokens that a reader finds under a request id; None when nothing is kept for it."""
        kept = self._sends.get(request)
        return None if kept is None or kept[0] <= now else kept[2]

    def read_done(self, request: str) -> None:
        """The reader has what it wanted."""
        if (kept := self._sends.pop(request, None)) is not None:
            self.pool.release(kept[1])

    def collect(self) -> None:
        """Give back the blocks of ended leases."""
        if self.table.any_loose or self.table.blocks_pinned:
            self.pool.release(self.table.take_loose())

    @property
    def kept_for_readers(self) -> int:
        """Requests whose blocks wait for a reader."""
        return len(self._sends)

    def _keep(self, work: Work, now: float) -> None:
        retention, send_s = self._retentions.pop(work, (None, None))
        tokens = work.prompt_tokens + work.output_tokens - 1
        self.counts.finished += 1
        self.counts.generated += work.output_tokens
        if retention is not None:
            self._hold(work, retention, tokens)
        if send_s is None:
            self.pool.release(work.blocks)
        else:
            self._sends[work.id] = (now + send_s, work.blocks, tokens)

    def _hold(self, work: Work, retention: Retention, tokens: int) -> None:
        length = min(tokens // self.timing.block_size, len(work.hashes), len(work.blocks))
        if retention.id is None or length < _MIN_LEASED_HASHES:
            return
        chain = HashChain.of(work.hashes[:length])
        held = self.table.hold(retention.id, chain, work.blocks[:length], retention.ttl_s)
        self.pool.refer(held.fresh)
        self.collect()

    def _expire_sends(self, now: float) -> None:
        for request, (expires, blocks, _) in list(self._sends.items()):
            if expires > now:
                return
            del self._sends[request]
            self.pool.release(blocks)

    def _make_room(self, blocks: int) -> bool:
        before = self.pool.free
        self.table.reclaim(blocks)
        self.collect()
        return self.pool.free > before

    def _removed(self, hashes: list[bytes]) -> None:
        if self._recording:
            self.events.append(Removed(hashes))

    def _stored(self, work: Work, start: int, end: int) -> None:
        if self._recording:
            self.events.append(Stored(work, start, end))
