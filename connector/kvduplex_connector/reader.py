"""The prefill engine's side: claim a turn's KV, read it only when granted, recompute in every other case.

Runs on the scheduler thread and never waits. One `_Turn` per request goes through: claimed, then granted or given up,
then read, then done. Whatever ends a request early gives its claim back.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvduplex_connector.holder import RequestLike
from kvduplex_connector.recorder import LeaseRecorder
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.claims import Claimant, PendingClaim
from kvduplex_transfer.leases.messages import Source
from kvduplex_transfer.leases.params import ClaimOffer

__all__ = ["Read", "Reader", "Skip"]

_log = logging.getLogger(__name__)

_LEAST_BUDGET_S: Final = 1.0
_MOST_CLAIMS: Final = 2
_SHOWN: Final = 12


class Skip(StrEnum):
    """Why an offered lease was not read though no decode engine refused it. A closed list: also a metric label."""

    MALFORMED = "malformed"
    FORBIDDEN = "forbidden"
    SHORT = "short"
    LAPSED = "lapsed"
    UNUSED = "unused"
    ABORTED = "aborted"
    READ_FAILED = "read_failed"


_ORDINARY: Final = frozenset({Skip.SHORT, Skip.UNUSED, Skip.ABORTED})
"""Reasons that need nobody's attention."""


@dataclass(frozen=True, slots=True)
class Read:
    """What the engine is to read for a request.

    Attributes:
        blocks: Ids of the decode engine's blocks, for the tokens from 0 on.
        source: Where they are.
        budget_s: Seconds from now within which the read must have ended; what came later may be foreign KV.
    """

    blocks: tuple[int, ...]
    source: Source
    budget_s: float


@dataclass(slots=True, eq=False)
class _Turn:
    chain: HashChain
    claim: PendingClaim
    claims: int = 1
    local_tokens: int = 0
    reading: int = 0  # tokens being read
    local_blocks: frozenset[int] = frozenset()
    recorded: bool = False


class Reader:
    """Claims and reads for one prefill engine.

    Args:
        claimant: Speaks to decode engines.
        recorder: Where outcomes are counted.
        block_size: Tokens of a block.
        threshold: Fewest tokens worth reading after local hits.
        peers: ``HOST:PORT`` of endpoints that may be asked; empty for any.
        cached_prefix: How many of a chain's first blocks this engine has already.
        clock: Monotonic seconds, the claimant's.
    """

    def __init__(
        self,
        *,
        claimant: Claimant,
        recorder: LeaseRecorder,
        block_size: int,
        threshold: int,
        peers: frozenset[str],
        cached_prefix: Callable[[list[bytes]], int],
        clock: Callable[[], float],
    ) -> None:
        self._claimant = claimant
        self._recorder = recorder
        self._block_size = block_size
        self._threshold = max(threshold, 1)
        self._peers = peers
        self._cached_prefix = cached_prefix
        self._clock = clock
        self._turns: dict[str, _Turn] = {}

    def arrived(self, request: RequestLike, offer: ClaimOffer) -> None:
        """Claim `offer` for a new request, unless reading it could not pay."""
        if self._peers and offer.endpoint.removeprefix("tcp://") not in self._peers:
            self._skip(Skip.FORBIDDEN, offer.id)
            return
        blocks = min(request.num_prompt_tokens // self._block_size, len(request.block_hashes))
        hashes = [bytes(block_hash) for block_hash in request.block_hashes[:blocks]]
        if (blocks - self._cached_prefix(hashes)) * self._block_size < self._threshold:
            self._skip(Skip.SHORT, offer.id)
            return
        chain = HashChain.of(hashes)
        self._turns[request.request_id] = _Turn(chain, self._claimant.claim(offer.endpoint, offer.id, chain))

    def malformed(self, error: Exception) -> None:
        """Count an offer that could not be read."""
        self._recorder.count("refused", Skip.MALFORMED)
        _log.warning("Recomputing a turn: %s", error)

    def matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> int | None:
        """Tokens to read beyond the `num_computed_tokens` that are here; None while the answer is on its way.

        0 after the claim was read, refused or given back: from then on the request is like any other.
        """
        turn = self._turns.get(request.request_id)
        if turn is None or turn.reading or request.num_preemptions:
            return 0
        self._claimant.poll()
        if turn.claim.waiting:
            return None
        self._record_answer(turn)
        grant = turn.claim.grant
        if grant is None:
            del self._turns[request.request_id]
            self._skip(turn.claim.refusal or Skip.UNUSED, turn.claim.lease)
            return 0
        if self._budget_s(turn) < _LEAST_BUDGET_S:  # it waited in the queue for longer than claims live
            return self._claim_again(request, turn)
        tokens = min(len(grant.blocks), request.num_prompt_tokens // self._block_size) * self._block_size
        if tokens - num_computed_tokens < self._threshold:
            self._give_back(request.request_id, Skip.SHORT)
            return 0
        turn.local_tokens = num_computed_tokens
        return tokens - num_computed_tokens

    def allocated(self, request: RequestLike, tokens: int, local_blocks: Iterable[int]) -> Read | None:
        """The scheduler made room for `tokens` external tokens in `local_blocks`; what to read into them, if anything.

        Without external tokens the claim, if there is one, is given back.
        """
        turn = self._turns.get(request.request_id)
        if turn is None or turn.reading:
            return None
        grant = turn.claim.grant
        if tokens <= 0 or grant is None:
            self._give_back(request.request_id, Skip.UNUSED)
            return None
        turn.reading = tokens
        turn.local_blocks = frozenset(local_blocks)
        end = (turn.local_tokens + tokens) // self._block_size
        source = _reachable(grant.source, turn.claim.endpoint)
        return Read(tuple(grant.blocks[:end]), source, self._budget_s(turn))

    def received(self, finished: Iterable[str], failed: Iterable[str], invalid_blocks: Iterable[int]) -> None:
        """Reads ended: those of requests in `failed`, or into any of `invalid_blocks`, in vain."""
        failed, invalid = set(failed), set(invalid_blocks)
        for request_id in finished:
            turn = self._turns.get(request_id)
            if turn is None or not turn.reading:
                continue
            del self._turns[request_id]
            if request_id in failed or not turn.local_blocks.isdisjoint(invalid):
                self._claimant.finish(turn.claim, consumed=False)
                self._skip(Skip.READ_FAILED, turn.claim.lease)
            else:
                self._claimant.finish(turn.claim, consumed=True)
                self._recorder.count("reused_tokens", n=turn.reading)

    def finished(self, request_id: str) -> None:
        """The request ended; a claim it still has is given back. What a read in flight brings is thrown away."""
        if request_id in self._turns:
            self._give_back(request_id, Skip.ABORTED)

    def poll(self) -> None:
        """Once a step: take in answers, and give up on those that are late."""
        if self._turns:
            self._claimant.poll()

    @property
    def waiting(self) -> int:
        """Requests with a claim that is not closed."""
        return len(self._turns)

    def _claim_again(self, request: RequestLike, turn: _Turn) -> int | None:
        if turn.claims >= _MOST_CLAIMS:
            self._give_back(request.request_id, Skip.LAPSED)
            return 0
        self._claimant.abandon(turn.claim)
        turn.claim = self._claimant.claim(turn.claim.endpoint, turn.claim.lease, turn.chain)
        turn.claims, turn.recorded = turn.claims + 1, False
        return None

    def _budget_s(self, turn: _Turn) -> float:
        """What is left of the claim. Counted from before it was sent, so it ends here before it ends there."""
        ttl_s = turn.claim.grant.ttl_s if turn.claim.grant else 0.0
        return turn.claim.sent_at + ttl_s - self._clock()

    def _record_answer(self, turn: _Turn) -> None:
        claim, grant = turn.claim, turn.claim.grant
        if turn.recorded or claim.answered_at is None:
            return
        turn.recorded = True
        self._recorder.observe("claim_seconds", claim.answered_at - claim.sent_at)
        if grant is not None:
            self._recorder.count("granted")
            foreign = min(grant.lease_blocks, len(turn.chain)) - len(grant.blocks)
            self._recorder.count("verified_away_tokens", n=max(foreign, 0) * self._block_size)

    def _give_back(self, request_id: str, reason: Skip) -> None:
        turn = self._turns.pop(request_id)
        self._claimant.abandon(turn.claim)
        self._skip(reason, turn.claim.lease)

    def _skip(self, reason: str, lease: str) -> None:
        self._recorder.count("refused", reason)
        level = logging.DEBUG if reason in _ORDINARY else logging.INFO
        _log.log(level, "Recomputing a turn: its claim on lease %s ended as %s", lease[:_SHOWN], reason)


def _reachable(source: Source, endpoint: str) -> Source:
    """Replace a host that means "myself" to the decode engine by the one its lease endpoint was reached at."""
    asked = endpoint.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
    if _means_myself(source.host) and not _means_myself(asked):
        return Source(
            source.engine_id, asked, source.port, source.tp_size, source.dcp_size, source.pp_size, source.generation
        )
    return source


def _means_myself(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in {"", "localhost"}
    return address.is_loopback or address.is_unspecified
