"""The prefill engine's side against a real lease endpoint over loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvduplex_connector import reader as reader_module
from kvduplex_connector.reader import Reader, Skip
from kvduplex_connector.recorder import LeaseRecorder, key_of
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.claims import Claimant
from kvduplex_transfer.leases.messages import Identity, Source
from kvduplex_transfer.leases.params import ClaimOffer
from kvduplex_transfer.leases.records import LeaseLimits
from kvduplex_transfer.leases.server import LeaseServer
from kvduplex_transfer.leases.table import LeaseTable

Requests = Callable[..., Any]
PROMPT = list(range(40))


class Clock:
    """Real time that can be pushed on."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Rig:
    """A reader, the decode engine it claims from, and what it counted."""

    def __init__(self, pool: Any, threshold: int = 8, peers: frozenset[str] = frozenset()) -> None:
        self.clock = Clock()
        self.table = LeaseTable(limits=LeaseLimits(budget_blocks=99, claim_ttl_s=20), clock=self.clock)
        self.server = LeaseServer(
            table=self.table,
            identity=lambda nonce: Identity(nonce, "e", "m", "v", 4, b"same", 0, 0, 1, 30.0, 480.0),
            source=lambda: Source("e", "127.0.0.1", 5700),
            host="127.0.0.1",
            port=0,
        )
        self.server.start()
        self.recorder = LeaseRecorder()
        self.claimant = Claimant(fingerprint=b"same", timeout_s=5.0, clock=self.clock)
        self.reader = Reader(
            claimant=self.claimant,
            recorder=self.recorder,
            block_size=4,
            threshold=threshold,
            peers=peers,
            cached_prefix=lambda hashes: next((n for n, h in enumerate(hashes) if h not in pool.cached), len(hashes)),
            clock=self.clock,
        )

    def hold(self, request: Any, blocks: int, lease: str = "lease") -> None:
        chain = HashChain.of(request.block_hashes[:blocks])
        self.table.hold(lease, chain, range(100, 100 + blocks), 60)

    def offer(self, lease: str = "lease") -> ClaimOffer:
        return ClaimOffer(lease, self.server.endpoint)

    def matched(self, request: Any, computed: int = 0) -> int:
        """What the scheduler learns in the end; it asks again while there is no answer."""
        deadline = time.monotonic() + 10
        while (tokens := self.reader.matched_tokens(request, computed)) is None:
            assert time.monotonic() < deadline
        return tokens

    def ends(self, how: str, count: int = 1) -> bool:
        deadline = time.monotonic() + 10
        while self.table.counts().claim_ends[how] != count:
            assert time.monotonic() < deadline, self.table.counts()
        return True

    def counted(self) -> dict[str, float]:
        return {key: sum(values) for key, values in self.recorder.drain().items() if key != key_of("claim_seconds")}

    def close(self) -> None:
        self.claimant.close()
        self.server.close()


@pytest.fixture
def rig(pool: Any) -> Iterator[Rig]:
    rig = Rig(pool)
    yield rig
    rig.close()


def test_a_granted_claim_is_read_and_consumed(rig: Rig, request_of: Requests) -> None:
    request = request_of(PROMPT)
    rig.hold(request, 7)
    rig.reader.arrived(request, rig.offer())
    assert rig.matched(request, computed=8) == 20
    read = rig.reader.allocated(request, 20, [1, 2, 3, 4, 5])
    assert read is not None
    assert read.blocks == tuple(range(100, 107))
    assert 0 < read.budget_s <= 20
    assert rig.reader.matched_tokens(request, 0) == 0, "a claim is read once"
    rig.reader.received(["r", "stranger"], (), ())
    assert rig.ends("consumed")
    assert rig.counted() == {"lease:granted": 1, "lease:reused_tokens": 20}
    assert rig.reader.waiting == 0


def test_an_edited_history_reads_its_common_prefix_and_counts_the_rest(rig: Rig, request_of: Requests) -> None:
    rig.hold(request_of(PROMPT), 10)
    edited = request_of([*PROMPT[:21], 99, *PROMPT[22:]])
    rig.reader.arrived(edited, rig.offer())
    assert rig.matched(edited) == 20
    assert rig.counted() == {"lease:granted": 1, "lease:verified_away_tokens": 20}


@pytest.mark.parametrize(
    ("lease", "prompt", "reason"), [("gone", PROMPT, "unknown"), ("lease", [7, *PROMPT], "mismatch")]
)
def test_a_refusal_means_recomputation(
    rig: Rig, request_of: Requests, lease: str, prompt: list[int], reason: str
) -> None:
    rig.hold(request_of(PROMPT), 10)
    request = request_of(prompt)
    rig.reader.arrived(request, rig.offer(lease))
    assert rig.matched(request) == 0
    assert rig.reader.allocated(request, 0, ()) is None
    assert rig.counted() == {f"lease:refused:{reason}": 1}


def test_local_hits_that_leave_too_little_give_the_claim_back(rig: Rig, request_of: Requests) -> None:
    request = request_of(PROMPT)
    rig.hold(request, 10)
    rig.reader.arrived(request, rig.offer())
    assert rig.matched(request, computed=36) == 0
    assert rig.ends("returned")
    assert rig.counted()[key_of("refused", Skip.SHORT)] == 1


def test_what_is_cached_already_is_not_claimed(rig: Rig, pool: Any, request_of: Requests) -> None:
    request = request_of(PROMPT)
    pool.cached = set(request.block_hashes[:9])
    rig.reader.arrived(request, rig.offer())
    assert rig.matched(request) == 0
    assert rig.counted() == {"lease:refused:short": 1}
    assert rig.table.counts().refused == {}


def test_a_prompt_that_was_cut_short_is_not_read_past_its_end(rig: Rig, request_of: Requests) -> None:
    request = request_of(PROMPT)
    rig.hold(request, 10)
    request.output = 3  # as if the engine had dropped its last tokens after hashing
    rig.reader.arrived(request, rig.offer())
    assert rig.matched(request) == 36


@pytest.mark.parametrize("stage", ["waiting", "granted", "reading"])
def test_an_aborted_request_gives_its_claim_back(rig: Rig, request_of: Requests, stage: str) -> None:
    request = request_of(PROMPT)
    rig.hold(request, 10)
    rig.reader.arrived(request, rig.offer())
    if stage != "waiting":
        rig.matched(request)
    if stage == "reading":
        assert rig.reader.allocated(request, 40, range(10)) is not None
    rig.reader.finished("r")
    assert rig.ends("returned")
    assert rig.reader.waiting == 0
    rig.reader.received(["r"], (), ())
    assert rig.table.snapshot().held == 1


def test_a_preempted_request_gives_its_claim_back_and_recomputes(rig: Rig, request_of: Requests) -> None:
    request = request_of(PROMPT)
    rig.hold(request, 10)
    rig.reader.arrived(request, rig.offer())
    rig.matched(request)
    request.num_preemptions = 1
    assert rig.reader.matched_tokens(request, 0) == 0
    assert rig.reader.allocated(request, 0, ()) is None
    assert rig.ends("returned")


@pytest.mark.parametrize(("failed", "invalid"), [(["r"], []), ([], [3])], ids=["by request", "by block"])
def test_a_failed_read_gives_the_claim_back_and_is_not_tried_again(
    rig: Rig, request_of: Requests, failed: list[str], invalid: list[int]
) -> None:
    request = request_of(PROMPT)
    rig.hold(request, 10)
    rig.reader.arrived(request, rig.offer())
    rig.reader.allocated(request, rig.matched(request), [1, 2, 3])
    rig.reader.received(["r"], failed, invalid)
    assert rig.ends("returned")
    assert rig.reader.matched_tokens(request, 0) == 0
    counted = rig.counted()
    assert counted[key_of("refused", Skip.READ_FAILED)] == 1
    assert key_of("reused_tokens") not in counted


def test_a_claim_that_lapsed_in_the_queue_is_made_again_once(rig: Rig, request_of: Requests) -> None:
    request = request_of(PROMPT)
    rig.hold(request, 10)
    rig.reader.arrived(request, rig.offer())
    rig.matched(request)
    rig.clock.ahead += 19.5
    assert rig.matched(request) == 40
    assert rig.table.counts().claimed == 2
    rig.clock.ahead += 19.5
    assert rig.matched(request) == 0
    assert rig.counted()[key_of("refused", Skip.LAPSED)] == 1


def test_an_endpoint_that_does_not_answer_costs_its_timeout_and_no_more(rig: Rig, request_of: Requests) -> None:
    request = request_of(PROMPT)
    rig.reader.arrived(request, ClaimOffer("lease", "tcp://127.0.0.1:1"))
    assert rig.reader.matched_tokens(request, 0) is None
    rig.clock.ahead += 5
    rig.reader.poll()
    assert rig.reader.matched_tokens(request, 0) == 0
    assert rig.counted() == {"lease:refused:timeout": 1}


def test_only_listed_endpoints_are_asked(pool: Any, request_of: Requests) -> None:
    rig = Rig(pool, peers=frozenset({"10.0.0.1:5800"}))
    request = request_of(PROMPT)
    rig.hold(request, 10)
    rig.reader.arrived(request, rig.offer())
    assert rig.matched(request) == 0
    assert rig.counted() == {"lease:refused:forbidden": 1}
    rig.close()


@pytest.mark.parametrize(
    ("told", "asked", "used"),
    [
        ("localhost", "tcp://10.0.0.7:5800", "10.0.0.7"),
        ("0.0.0.0", "tcp://decode-0:5800", "decode-0"),
        ("::1", "tcp://[fd00::7]:5800", "fd00::7"),
        ("10.0.0.9", "tcp://10.0.0.7:5800", "10.0.0.9"),
        ("127.0.0.1", "tcp://127.0.0.1:5800", "127.0.0.1"),
    ],
)
def test_a_host_that_means_myself_is_replaced_by_the_one_that_answered(told: str, asked: str, used: str) -> None:
    assert reader_module._reachable(Source("e", told, 5700), asked).host == used
