"""What the lease table keeps: leases, claims, limits and counts. Plain data, no I/O, no clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.errors import LeaseConfigError
from kvduplex_transfer.leases.params import MAX_TTL_S
from kvduplex_transfer.leases.states import LeaseState

__all__ = ["Claim", "ClaimKey", "Grant", "Held", "Lease", "LeaseCounts", "LeaseLimits", "LeaseSnapshot"]

ClaimKey = tuple[bytes, int]
"""Who claims: the peer's routing identity and the number it chose for the claim."""

_MIN_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Bounds of a lease table.

    Attributes:
        budget_blocks: Most KV blocks that leases may pin together, each counted once.
        lease_ttl_s: Seconds a lease lives from its last renewal when the renewal names no other time.
        max_ttl_s: Seconds after which a lease ends whatever its renewals, and its whole life when it gets none.
        claim_ttl_s: Seconds a granted claim may stay open before its reader counts as gone.
        max_claims: Claims open at once.
        max_leases: Leases alive at once; the least recently renewed one gives way.
        max_ended: Ended leases remembered, so that a refusal can say why.

    Raises:
        LeaseConfigError: A value is out of range.
    """

    budget_blocks: int
    lease_ttl_s: float = 30.0
    max_ttl_s: float = 480.0
    claim_ttl_s: float = 30.0
    max_claims: int = 1024
    max_leases: int = 65_536
    max_ended: int = 8192

    def __post_init__(self) -> None:
        for key in ("budget_blocks", "max_claims", "max_leases", "max_ended"):
            if getattr(self, key) < 0:
                raise LeaseConfigError(f"{key} = {getattr(self, key)}: expected 0 or more")
        for key in ("lease_ttl_s", "max_ttl_s", "claim_ttl_s"):
            if not _MIN_S <= getattr(self, key) <= MAX_TTL_S:
                raise LeaseConfigError(f"{key} = {getattr(self, key)}: expected {_MIN_S:g} to {MAX_TTL_S:g} seconds")


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to keep blocks. Compared by identity: a later lease may carry the same id.

    Attributes:
        id: Named by the router.
        chain: Hashes of the kept blocks.
        blocks: Ids of the kept blocks, in the order of `chain`.
        expires: When it ends unless renewed, on the table's clock.
        limit: When it ends whatever happens, on the table's clock.
        claims: Open claims that read from it.
        ended: Its final state once it takes no more claims; its blocks stay pinned until `claims` is empty.
    """

    id: str
    chain: HashChain
    blocks: tuple[int, ...]
    expires: float
    limit: float
    claims: set[ClaimKey] = field(default_factory=set)
    ended: LeaseState | None = None

    @property
    def state(self) -> LeaseState:
        """Its state now."""
        return self.ended or (LeaseState.CLAIMED if self.claims else LeaseState.HELD)


@dataclass(frozen=True, slots=True)
class Claim:
    """A reader's hold on a lease until `deadline`, on the table's clock."""

    key: ClaimKey
    lease: Lease
    deadline: float


@dataclass(frozen=True, slots=True)
class Held:
    """What a new lease holds.

    Attributes:
        blocks: How many of the offered blocks, from the first on; 0 when there is no lease.
        fresh: Ids of those among them that the engine must pin now; other leases pin the rest.
    """

    blocks: int
    fresh: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """A granted claim.

    Attributes:
        blocks: Ids of the blocks that belong to the claimed prompt, first block first.
        lease_blocks: Blocks the lease holds altogether.
        ttl_s: Seconds within which the read must have ended.
    """

    blocks: tuple[int, ...]
    lease_blocks: int
    ttl_s: float


@dataclass(slots=True)
class LeaseCounts:
    """Events since the table was made; they only grow.

    Attributes:
        held: Leases that began.
        trimmed: Leases that kept only their first blocks, because the budget had no room for all.
        denied: Leases that could not begin, because the budget had no room at all.
        claimed: Claims granted.
        renewed: Renewals of a lease that was alive.
        ends: Ended leases by final state.
        claim_ends: Ended claims by how they ended.
        refused: Refused claims by reason.
    """

    held: int = 0
    trimmed: int = 0
    denied: int = 0
    claimed: int = 0
    renewed: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    claim_ends: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def copy(self) -> LeaseCounts:
        """The counts as they stand, independent of what follows."""
        return replace(
            self, ends=Counter(self.ends), claim_ends=Counter(self.claim_ends), refused=Counter(self.refused)
        )


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """The table at one moment.

    Attributes:
        held: Leases alive without a claim.
        claimed: Leases with an open claim.
        claims: Open claims.
        blocks_pinned: KV blocks pinned, each counted once.
        budget_blocks: Most that may be pinned.
    """

    held: int
    claimed: int
    claims: int
    blocks_pinned: int
    budget_blocks: int
