"""Continuous batching over plain data: which requests run, what a step computes, how long it takes.

As vLLM's scheduler does: running requests first, one token each; then prompt tokens in order of arrival, in chunks,
within the step's token budget. Blocks for the whole answer are set aside when a request is admitted, for its length is
known here, so nothing is ever preempted.

A step of generation alone repeats until something changes, so `begin` may plan many of them at once; `cut` ends such a
run early, at the boundary of a step, when a request arrives.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvduplex_bench.sim.core.blocks import BlockPool
from kvduplex_bench.sim.core.sequence import LoadEnd, Phase, Work
from kvduplex_bench.sim.core.timing import Timing

__all__ = ["Scheduler", "Step"]


@dataclass(slots=True)
class Step:
    """Steps under way.

    Attributes:
        began: When they began.
        each_s: Seconds of each.
        count: How many.
        chunks: Prompt tokens computed, by request.
        first: Requests that got their first token; known at the end.
        finished: Requests that are done; known at the end.
    """

    began: float
    each_s: float
    count: int
    chunks: list[tuple[Work, int]] = field(default_factory=list)
    first: list[Work] = field(default_factory=list)
    finished: list[Work] = field(default_factory=list)

    @property
    def ends(self) -> float:
        """When the last of them ends."""
        return self.began + self.each_s * self.count


class Scheduler:
    """The requests of one engine.

    Args:
        timing: How long things take.
        pool: The engine's blocks.
        make_room: Asked to free so many blocks when too few are; True when it freed any.
        stored: Told of blocks that can be found from now on: the request, and the range of its blocks.
    """

    def __init__(
        self,
        timing: Timing,
        pool: BlockPool,
        *,
        make_room: Callable[[int], bool] = lambda _blocks: False,
        stored: Callable[[Work, int, int], None] = lambda _work, _start, _end: None,
    ) -> None:
        self._timing = timing
        self._pool = pool
        self._make_room = make_room
        self._stored = stored
        self._waiting: deque[Work] = deque()
        self._loading: list[tuple[float, int, Work]] = []
        self._prefilling: list[Work] = []
        self._due: list[tuple[int, int, Work]] = []
        self._order = itertools.count()
        self._context = 0
        self.decoding: dict[Work, None] = {}
        self.step_number = 0
        self.slow = 1.0
        """Everything takes so many times longer."""

    @property
    def waiting(self) -> int:
        """Requests without blocks, or waiting for KV."""
        return len(self._waiting) + len(self._loading)

    @property
    def running(self) -> int:
        """Requests that compute or generate."""
        return len(self._prefilling) + len(self.decoding)

    def blocks_needed(self, work: Work) -> int:
        """Blocks that `work` will hold at its end."""
        return -(-(work.prompt_tokens + work.output_tokens - 1) // self._timing.block_size)

    def add(self, work: Work) -> None:
        """Take in a request."""
        self._waiting.append(work)

    def abort(self, work: Work) -> None:
        """Drop a request, whatever it is doing."""
        if work.phase in (Phase.FINISHED, Phase.ABORTED):
            return
        if work.phase is Phase.WAITING:
            self._waiting.remove(work)
            self._end_load(work, LoadEnd.UNUSED)
        elif work.phase is Phase.LOADING:
            self._loading = [entry for entry in self._loading if entry[2] is not work]
            heapq.heapify(self._loading)
            self._end_load(work, LoadEnd.UNUSED)
        elif work.phase is Phase.PREFILL:
            self._prefilling.remove(work)
        else:
            self._leave(work)
        work.phase = Phase.ABORTED
        self._pool.release(work.blocks)

    def begin(self, now: float, longest: int = 1) -> Step | None:
        """Plan what comes next; None when there is nothing to do before `next_load`.

        Args:
            now: The time.
            longest: Most steps of pure generation planned at once.
        """
        self._collect_loads(now)
        budget = self._timing.max_num_batched_tokens - len(self.decoding)
        chunks: list[tuple[Work, int]] = []
        for work in self._prefilling:
            if budget <= 0:
                break
            chunks.append((work, min(work.prompt_tokens - work.computed, budget)))
            budget -= chunks[-1][1]
        self._admit(now, chunks, budget)
        if chunks:
            return Step(now, self._chunk_s(chunks) * self.slow, 1, chunks)
        if not self.decoding:
            return None
        count = min(longest, max(1, self._due[0][0] - self.step_number))
        middle = self._context + len(self.decoding) * (count - 1) / 2
        return Step(now, self._timing.decode_step_s(len(self.decoding), middle) * self.slow, count)

    def cut(self, step: Step, now: float) -> None:
        """Something came at `now`: let `step` end at the next boundary."""
        if step.count > 1 and step.each_s > 0:
            step.count = max(1, min(step.count, math.ceil((now - step.began) / step.each_s)))

    def end(self, step: Step) -> Step:
        """`step` is over: fill in what it brought, and return it."""
        self.step_number += step.count
        self._context += step.count * len(self.decoding)
        ends = step.ends
        while self._due and self._due[0][0] <= self.step_number:
            work = heapq.heappop(self._due)[2]
            if work.phase is Phase.DECODE:
                self._leave(work)
                self._finish(work, step)
        for work, tokens in step.chunks:
            if work.phase is Phase.PREFILL:
                self._advance(work, tokens, step, ends)
        return step

    def next_load(self) -> float | None:
        """When KV that is being read will be there."""
        return self._loading[0][0] if self._loading else None

    def _advance(self, work: Work, tokens: int, step: Step, ends: float) -> None:
        work.computed += tokens
        work.extra_s = 0.0
        self._store(work, work.computed)
        if work.computed < work.prompt_tokens:
            return
        self._prefilling.remove(work)
        work.first_step, work.first_token_at = self.step_number, ends
        step.first.append(work)
        if work.output_tokens == 1:
            self._finish(work, step)
            return
        work.phase = Phase.DECODE
        self.decoding[work] = None
        self._context += work.prompt_tokens + 1
        heapq.heappush(self._due, (self.step_number + work.output_tokens - 1, next(self._order), work))

    def _leave(self, work: Work) -> None:
        del self.decoding[work]
        self._context -= work.prompt_tokens + work.generated(self.step_number)

    def _finish(self, work: Work, step: Step) -> None:
        work.phase = Phase.FINISHED
        self._store(work, work.prompt_tokens + work.output_tokens - 1)
        step.finished.append(work)

    def _store(self, work: Work, tokens: int) -> None:
        end = min(tokens // self._timing.block_size, len(work.hashes))
        start, store, blocks, hashes = work.stored, self._pool.store, work.blocks, work.hashes
        fresh = [position for position in range(start, end) if store(blocks[position], hashes[position])]
        work.stored = max(start, end)
        if fresh:
            self._stored(work, fresh[0], fresh[-1] + 1)

    def _admit(self, now: float, chunks: list[tuple[Work, int]], budget: int) -> None:
        while self._waiting and budget > 0 and self.running < self._timing.max_num_seqs:
            work = self._waiting[0]
            if not self._allocate(work):
                return
            self._waiting.popleft()
            work.scheduled_at = now
            if self._start_load(work, now):
                continue
            tokens = self._start(work, budget)
            chunks.append((work, tokens))
            budget -= tokens

    def _start(self, work: Work, budget: int) -> int:
        work.phase = Phase.PREFILL
        self._prefilling.append(work)
        return min(work.prompt_tokens - work.computed, budget)

    def _allocate(self, work: Work) -> bool:
        size = self._timing.block_size
        hits = self._pool.match(work.hashes[: (work.prompt_tokens - 1) // size])
        more = self.blocks_needed(work) - len(hits)
        while (blocks := self._pool.take(hits, more)) is None:
            if not self._make_room(self._pool.lacking(hits, more)):
                return False
        work.blocks, work.stored = blocks, len(hits)
        work.computed = work.local_hits = len(hits) * size
        return True

    def _start_load(self, work: Work, now: float) -> bool:
        load = work.load
        if load is None:
            return False
        external = min(load.tokens, work.prompt_tokens - 1) - work.local_hits
        if external < max(load.least_tokens, 1):
            self._end_load(work, LoadEnd.UNUSED)
            return False
        work.external, work.phase = external, Phase.LOADING
        heapq.heappush(self._loading, (now + load.seconds(external) * self.slow, next(self._order), work))
        return True

    def _collect_loads(self, now: float) -> None:
        while self._loading and self._loading[0][0] <= now:
            work = heapq.heappop(self._loading)[2]
            load = work.load
            work.computed = work.local_hits + work.external
            work.extra_s = load.reuse_s(work.external) if load is not None else 0.0
            self._store(work, work.computed)
            self._end_load(work, LoadEnd.READ)
            work.phase = Phase.PREFILL
            self._prefilling.append(work)

    def _chunk_s(self, chunks: list[tuple[Work, int]]) -> float:
        tokens = sum(count for _, count in chunks)
        attended = sum(count * (work.computed + count / 2) for work, count in chunks)
        extra = sum(work.extra_s for work, _ in chunks)
        if tokens == len(chunks):  # one last token each, of prompts whose KV came: as cheap as generating
            context = self._context + sum(work.prompt_tokens for work, _ in chunks)
            return extra + self._timing.decode_step_s(len(self.decoding) + len(chunks), context)
        return extra + self._timing.prefill_step_s(tokens, attended, len(self.decoding), self._context)

    @staticmethod
    def _end_load(work: Work, end: LoadEnd) -> None:
        load, work.load = work.load, None
        if load is not None:
            load.ended(end)
