"""The lease table, rule by rule."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvduplex_transfer.leases import table as table_module
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.errors import InvalidLeaseError, LeaseConfigError
from kvduplex_transfer.leases.records import Grant, LeaseLimits
from kvduplex_transfer.leases.states import RefusalReason
from kvduplex_transfer.leases.table import LeaseTable

Chains = Callable[[Sequence[object]], HashChain]
LIMITS = LeaseLimits(budget_blocks=10, lease_ttl_s=30, max_ttl_s=480, claim_ttl_s=20, max_claims=3)


@pytest.fixture
def table(clock: Any) -> LeaseTable:
    return LeaseTable(limits=LIMITS, clock=clock)


def granted(answer: Grant | RefusalReason) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def test_a_claim_gets_the_blocks_of_the_common_chain(table: LeaseTable, make_chain: Chains) -> None:
    assert table.hold("a", make_chain("ABCD"), [7, 3, 9, 1], 30).fresh == (7, 3, 9, 1)
    grant = granted(table.claim((b"p", 1), "a", make_chain("ABXYZ")))
    assert grant == Grant(blocks=(7, 3), lease_blocks=4, ttl_s=20)


def test_a_foreign_prompt_gets_nothing(table: LeaseTable, make_chain: Chains) -> None:
    table.hold("a", make_chain("ABCD"), [1, 2, 3, 4], 30)
    assert table.claim((b"p", 1), "a", make_chain("XBCD")) is RefusalReason.MISMATCH
    assert table.snapshot().held == 1


def test_each_ending_gives_its_own_reason(table: LeaseTable, make_chain: Chains, clock: Any) -> None:
    chain = make_chain("A")
    for block, lease in enumerate(["released", "reclaimed", "consumed", "expired"], 1):
        table.hold(lease, chain, [block], 30)
    table.release(["released"])
    table.renew(["consumed", "expired"])
    table.reclaim(1)
    granted(table.claim((b"p", 1), "consumed", chain))
    table.finish((b"p", 1), consumed=True)
    clock.advance(30)
    reasons = {name: table.claim((b"p", 2), name, chain) for name in ("released", "reclaimed", "consumed", "expired")}
    assert reasons == {
        "released": RefusalReason.RELEASED,
        "reclaimed": RefusalReason.RECLAIMED,
        "consumed": RefusalReason.CONSUMED,
        "expired": RefusalReason.EXPIRED,
    }
    assert table.claim((b"p", 2), "never", chain) is RefusalReason.UNKNOWN
    assert sorted(table.take_loose()) == [1, 2, 3, 4]


def test_without_renewal_a_lease_lives_its_longest_time(table: LeaseTable, make_chain: Chains, clock: Any) -> None:
    table.hold("a", make_chain("A"), [1])
    clock.advance(479.9)
    assert table.snapshot().held == 1
    clock.advance(0.1)
    assert table.snapshot().held == 0


def test_renewals_count_from_now_and_never_pass_the_longest_time(
    table: LeaseTable, make_chain: Chains, clock: Any
) -> None:
    table.hold("a", make_chain("A"), [1], 30)
    for _ in range(23):
        clock.advance(20)
        assert table.renew(["a", "nobody"]) == ["a"]
    clock.advance(19.9)  # 479.9 s after it began
    assert table.renew(["a"], 60) == ["a"]
    clock.advance(0.2)
    assert table.renew(["a"]) == []


def test_a_claimed_lease_outlives_its_time_until_the_claim_ends(
    table: LeaseTable, make_chain: Chains, clock: Any
) -> None:
    table.hold("a", make_chain("A"), [1], 5)
    granted(table.claim((b"p", 1), "a", make_chain("A")))
    clock.advance(19)
    assert table.snapshot().claimed == 1
    assert table.reclaim(1) == 0
    table.finish((b"p", 1), consumed=False)
    assert table.snapshot().held == 0
    assert table.take_loose() == [1]


def test_a_silent_reader_loses_its_claim(table: LeaseTable, make_chain: Chains, clock: Any) -> None:
    table.hold("a", make_chain("AB"), [1, 2], 60)
    granted(table.claim((b"p", 1), "a", make_chain("A")))
    clock.advance(20)
    assert (table.snapshot().held, table.snapshot().claims) == (1, 0)
    assert not table.finish((b"p", 1), consumed=True)
    assert table.counts().claim_ends == {"lapsed": 1}


def test_two_branches_read_one_lease_and_the_blocks_stay_for_the_slower(table: LeaseTable, make_chain: Chains) -> None:
    table.hold("a", make_chain("ABC"), [1, 2, 3], 30)
    assert granted(table.claim((b"p", 1), "a", make_chain("ABC"))).blocks == (1, 2, 3)
    assert granted(table.claim((b"q", 1), "a", make_chain("ABX"))).blocks == (1, 2)
    table.finish((b"p", 1), consumed=True)
    assert table.take_loose() == []
    assert table.claim((b"r", 1), "a", make_chain("ABC")) is RefusalReason.CONSUMED
    table.finish((b"q", 1), consumed=True)
    assert table.take_loose() == [3, 2, 1]


def test_open_claims_are_bounded_and_numbers_are_not_reused(table: LeaseTable, make_chain: Chains) -> None:
    table.hold("a", make_chain("A"), [1], 30)
    for number in range(2):
        granted(table.claim((b"p", number), "a", make_chain("A")))
    assert table.claim((b"p", 1), "a", make_chain("A")) is RefusalReason.BUSY
    granted(table.claim((b"p", 2), "a", make_chain("A")))
    assert table.claim((b"p", 3), "a", make_chain("A")) is RefusalReason.BUSY


def test_over_the_budget_the_least_recently_renewed_gives_way(table: LeaseTable, make_chain: Chains) -> None:
    table.hold("a", make_chain("AAAA"), [1, 2, 3, 4])
    table.hold("b", make_chain("BBBB"), [5, 6, 7, 8])
    table.renew(["a"])
    assert table.hold("c", make_chain("CCCC"), [9, 10, 11, 12]).fresh == (9, 10, 11, 12)
    assert table.take_loose() == [8, 7, 6, 5]
    assert table.renew(["a", "b", "c"]) == ["a", "c"]


def test_claimed_leases_keep_their_room_and_the_newcomer_is_cut(table: LeaseTable, make_chain: Chains) -> None:
    table.hold("a", make_chain("ABCDEFGH"), range(8))
    granted(table.claim((b"p", 1), "a", make_chain("A")))
    assert table.hold("b", make_chain("BBBB"), [20, 21, 22, 23]).fresh == (20, 21)
    assert granted(table.claim((b"p", 2), "b", make_chain("BBBB"))).lease_blocks == 2
    assert table.hold("c", make_chain("C"), [30]).fresh == ()
    counts = table.counts()
    assert (counts.trimmed, counts.denied) == (1, 1)


def test_shared_blocks_are_pinned_and_counted_once(table: LeaseTable, make_chain: Chains) -> None:
    assert table.hold("a", make_chain("SSSA"), [1, 2, 3, 4]).fresh == (1, 2, 3, 4)
    assert table.hold("b", make_chain("SSSB"), [1, 2, 3, 5]).fresh == (5,)
    assert table.snapshot().blocks_pinned == 5
    table.release(["a"])
    assert table.take_loose() == [4]


def test_a_reused_id_replaces_the_older_lease_but_not_under_its_reader(table: LeaseTable, make_chain: Chains) -> None:
    table.hold("a", make_chain("AB"), [1, 2])
    granted(table.claim((b"p", 1), "a", make_chain("AB")))
    assert table.hold("a", make_chain("ABC"), [1, 2, 3]).fresh == (3,)
    assert granted(table.claim((b"p", 2), "a", make_chain("ABC"))).blocks == (1, 2, 3)
    table.finish((b"p", 2), consumed=True)
    assert table.take_loose() == [3]
    table.finish((b"p", 1), consumed=True)
    assert table.take_loose() == [2, 1]


def test_dropping_everything_spares_open_claims_until_they_end(table: LeaseTable, make_chain: Chains) -> None:
    table.hold("a", make_chain("A"), [1])
    table.hold("b", make_chain("B"), [2])
    granted(table.claim((b"p", 1), "b", make_chain("B")))
    table.drop_held()
    assert table.take_loose() == [1]
    table.finish((b"p", 1), consumed=False)
    assert table.take_loose() == [2]
    assert table.snapshot().held == 0


def test_leases_and_memories_of_them_are_bounded(clock: Any, make_chain: Chains) -> None:
    table = LeaseTable(limits=LeaseLimits(budget_blocks=4, max_leases=2, max_ended=1), clock=clock)
    chain = make_chain("A")
    for lease in "abcd":
        table.hold(lease, chain, [1])
    assert table.renew("abcd") == ["c", "d"]
    assert table.claim((b"p", 1), "a", chain) is RefusalReason.UNKNOWN
    assert table.claim((b"p", 1), "b", chain) is RefusalReason.RECLAIMED


def test_the_next_end_is_never_announced_too_late(table: LeaseTable, make_chain: Chains, clock: Any) -> None:
    assert table.seconds_to_next_end() == float("inf")
    table.hold("a", make_chain("A"), [1], 30)
    assert table.seconds_to_next_end() == 30
    granted(table.claim((b"p", 1), "a", make_chain("A")))
    assert table.seconds_to_next_end() == 20
    clock.advance(25)
    assert table.seconds_to_next_end() == 0
    table.sweep()
    assert table.seconds_to_next_end() == 5


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_bad_times_are_refused(table: LeaseTable, make_chain: Chains, ttl_s: float) -> None:
    with pytest.raises(InvalidLeaseError):
        table.hold("a", make_chain("A"), [1], ttl_s)
    with pytest.raises(InvalidLeaseError):
        table.renew(["a"], ttl_s)


def test_hashes_and_blocks_must_pair(table: LeaseTable, make_chain: Chains) -> None:
    with pytest.raises(InvalidLeaseError, match="2 blocks with 1 hashes"):
        table.hold("a", make_chain("A"), [1, 2])


@pytest.mark.parametrize("wrong", [{"budget_blocks": -1}, {"lease_ttl_s": 0}, {"claim_ttl_s": 1e9}, {"max_claims": -1}])
def test_limits_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(LeaseConfigError, match=next(iter(wrong))):
        LeaseLimits(**{"budget_blocks": 1, **wrong})  # type: ignore[arg-type]


def test_the_table_knows_no_clock_of_its_own() -> None:
    assert not {"time", "datetime"} & set(vars(table_module))


def act_as_peer(table: LeaseTable, name: bytes, chain: HashChain, stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        lease = f"l{number % 7}"
        if isinstance(table.claim((name, number), lease, chain), Grant):
            table.finish((name, number), consumed=number % 3 == 0)
        table.renew([lease])
        if number % 5 == 0:
            table.release([lease])


def test_threads_may_race(clock: Any, make_chain: Chains) -> None:
    """Claims, renewals and releases from four threads while the owner holds: the books balance after it."""
    table = LeaseTable(limits=LeaseLimits(budget_blocks=50, max_claims=64), clock=clock)
    chain, stop = make_chain("AB"), threading.Event()
    peers = [threading.Thread(target=act_as_peer, args=(table, bytes([n]), chain, stop)) for n in range(4)]
    for peer in peers:
        peer.start()
    references: Counter[int] = Counter()
    for turn in range(300):
        references.update(table.hold(f"l{turn % 7}", chain, [turn % 40, turn % 40 + 1]).fresh)
        references.subtract(table.take_loose())
    stop.set()
    for peer in peers:
        peer.join(timeout=30)
        assert not peer.is_alive()
    table.drop_held()
    references.subtract(table.take_loose())
    assert not any(references.values())
    assert table.snapshot().claims == 0


def test_leases_that_ended_early_are_not_remembered_until_their_time(clock: Any, make_chain: Chains) -> None:
    table = LeaseTable(limits=LeaseLimits(budget_blocks=4), clock=clock)
    chain = make_chain("A")
    for number in range(5_000):
        table.hold(f"lease-{number}", chain, [1])
        table.release([f"lease-{number}"])
    assert len(table._due._heap) < 2_000
