"""The lease table under any sequence of events, against a block pool that counts references as an engine does."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.records import ClaimKey, Grant, LeaseLimits
from kvduplex_transfer.leases.states import RefusalReason
from kvduplex_transfer.leases.table import LeaseTable

POOL = 24
BUDGET = 12
LONGEST = 100.0
CLAIM_S = 20.0
IDS = st.sampled_from(["a", "b", "c", "d", "e"])
HISTORY = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def chain_of(tokens: list[int]) -> HashChain:
    parent, hashes = b"", []
    for token in tokens:
        parent = hashlib.sha256(parent + bytes([token])).digest()
        hashes.append(parent)
    return HashChain.of(hashes)


class LeaseMachine(RuleBasedStateMachine):
    """An engine with a prefix cache: a block is reused for the same content and overwritten only when unreferenced."""

    leases = Bundle("leases")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        limits = LeaseLimits(
            budget_blocks=BUDGET, lease_ttl_s=30, max_ttl_s=LONGEST, claim_ttl_s=CLAIM_S, max_claims=4, max_leases=4
        )
        self.table = LeaseTable(limits=limits, clock=lambda: self.now)
        self.references: Counter[int] = Counter()
        self.content: dict[int, bytes] = {}
        self.open: dict[ClaimKey, tuple[Grant, HashChain, float]] = {}
        self.born: dict[str, float] = {}
        self.numbers = 0

    def give_back(self) -> None:
        for block in self.table.take_loose():
            self.references[block] -= 1

    def blocks_for(self, chain: HashChain) -> list[int] | None:
        """Reuse blocks of equal content, overwrite unreferenced ones; None when the pool is full."""
        cached = {content: block for block, content in self.content.items()}
        chosen: list[int] = []
        for position in range(len(chain)):
            content = chain.at(position)
            block = cached.get(content)
            if block is None or block in chosen:
                free = (b for b in range(POOL) if not self.references[b] and b not in chosen)
                block = next(free, None)
                if block is None:
                    return None
                self.content[block] = content
            chosen.append(block)
        return chosen

    @rule(target=leases, lease=IDS, tokens=HISTORY, ttl_s=st.none() | st.sampled_from([5.0, 30.0, 500.0]))
    def hold(self, lease: str, tokens: list[int], ttl_s: float | None) -> Any:
        self.give_back()
        chain = chain_of(tokens)
        blocks = self.blocks_for(chain)
        if blocks is None:
            return multiple()
        for block in self.table.hold(lease, chain, blocks, ttl_s).fresh:
            self.references[block] += 1
        self.born[lease] = self.now
        return lease, tokens

    @rule(target=claims, lease=leases, cut=st.integers(0, 8), tail=st.lists(st.integers(0, 2), max_size=4))
    def claim(self, lease: tuple[str, list[int]], cut: int, tail: list[int]) -> Any:
        """A later turn of the same conversation, edited from its `cut`-th block on."""
        key = (b"peer", self.numbers)
        self.numbers += 1
        chain = chain_of(lease[1][:cut] + tail)
        answer = self.table.claim(key, lease[0], chain)
        if isinstance(answer, RefusalReason):
            return multiple()
        for position, block in enumerate(answer.blocks):
            assert self.content[block] == chain.at(position), "a granted block holds other tokens"
        self.open[key] = (answer, chain, self.now)
        return key

    @rule(key=consumes(claims), consumed=st.booleans())
    def finish(self, key: ClaimKey, consumed: bool) -> None:
        lapsed = self.now - self.open[key][2] >= CLAIM_S
        assert self.table.finish(key, consumed=consumed) is not lapsed
        del self.open[key]

    @rule(leases=st.lists(IDS, max_size=3), ttl_s=st.none() | st.sampled_from([1.0, 30.0, 500.0]))
    def renew(self, leases: list[str], ttl_s: float | None) -> None:
        self.table.renew(leases, ttl_s)

    @rule(leases=st.lists(IDS, max_size=3))
    def release(self, leases: list[str]) -> None:
        self.table.release(leases)

    @rule(blocks=st.integers(0, POOL))
    def reclaim(self, blocks: int) -> None:
        before = self.table.snapshot()
        came_loose = self.table.reclaim(blocks)
        after = self.table.snapshot()
        assert came_loose == before.blocks_pinned - after.blocks_pinned
        assert after.claimed == before.claimed, "a claimed lease was reclaimed"
        assert came_loose >= blocks or after.held == 0

    @precondition(lambda self: self.numbers % 5 == 4)
    @rule()
    def drop(self) -> None:
        self.table.drop_held()
        assert self.table.snapshot().held == 0

    @rule(seconds=st.sampled_from([0.125, 1.0, 4.0, 19.875, 20.0, 31.0, 101.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def collect(self) -> None:
        self.give_back()

    @invariant()
    def open_claims_read_what_they_were_granted(self) -> None:
        for grant, chain, since in self.open.values():
            if self.now - since < CLAIM_S:
                for position, block in enumerate(grant.blocks):
                    assert self.references[block] > 0, "a claimed block was given back"
                    assert self.content[block] == chain.at(position)

    @invariant()
    def the_budget_holds_and_no_reference_is_lost(self) -> None:
        self.give_back()
        snapshot = self.table.snapshot()
        self.give_back()
        assert snapshot.blocks_pinned <= BUDGET
        assert set(self.references.values()) <= {0, 1}
        assert sum(self.references.values()) == snapshot.blocks_pinned

    @invariant()
    def no_lease_outlives_its_longest_time(self) -> None:
        reading = {key for key, (_, _, since) in self.open.items() if self.now - since < CLAIM_S}
        if not reading and all(self.now - born >= LONGEST for born in self.born.values()):
            assert self.table.snapshot().blocks_pinned == 0

    def teardown(self) -> None:
        self.now += LONGEST + CLAIM_S
        self.table.sweep()
        self.give_back()
        assert not any(self.references.values()), "a lease never ended"
        counts = self.table.counts()
        assert counts.held == sum(counts.ends.values())
        assert counts.claimed == sum(counts.claim_ends.values())


# A busy machine is no fault of the table, so slowness is no failure.
LeaseMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLeaseTable = LeaseMachine.TestCase
