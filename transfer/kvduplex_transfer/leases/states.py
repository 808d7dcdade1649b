"""The words of the lease room: states, refusal reasons, and how a claim ends."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["ENDED", "ClaimEnd", "ClaimFailure", "LeaseState", "RefusalReason"]


class LeaseState(StrEnum):
    """Where a lease stands. ``held`` and ``claimed`` are alive; the others are final."""

    HELD = "held"
    CLAIMED = "claimed"
    CONSUMED = "consumed"
    EXPIRED = "expired"
    RECLAIMED = "reclaimed"
    RELEASED = "released"


ENDED = frozenset({LeaseState.CONSUMED, LeaseState.EXPIRED, LeaseState.RECLAIMED, LeaseState.RELEASED})
"""The final states."""


class RefusalReason(StrEnum):
    """Why a decode engine refused a claim. A closed list: it is also a metric label.

    Attributes:
        UNKNOWN: No lease of that id was ever held here, or it ended too long ago to remember.
        EXPIRED: Its time ran out.
        RECLAIMED: The engine took its memory back.
        RELEASED: The router gave it up, or a later request took its id.
        CONSUMED: An earlier claim has read it.
        BUSY: Too many claims are open, or this claim number is in use.
        MISMATCH: Not even the first block of the prompt equals the lease's.
        INCOMPATIBLE: The engines differ in model, data type, block size, KV layout or hash seed.
    """

    UNKNOWN = "unknown"
    EXPIRED = "expired"
    RECLAIMED = "reclaimed"
    RELEASED = "released"
    CONSUMED = "consumed"
    BUSY = "busy"
    MISMATCH = "mismatch"
    INCOMPATIBLE = "incompatible"


class ClaimEnd(StrEnum):
    """How a granted claim ended.

    Attributes:
        CONSUMED: The reader has every block; the lease is done.
        RETURNED: The reader did not read, or its read failed; the lease may be claimed again.
        LAPSED: The reader said nothing before the claim's deadline.
    """

    CONSUMED = "consumed"
    RETURNED = "returned"
    LAPSED = "lapsed"


class ClaimFailure(StrEnum):
    """Why a claimant has no answer. A closed list: it is also a metric label.

    Attributes:
        TIMEOUT: The decode engine did not answer in time.
        UNREACHABLE: It has not answered for a while, or its queue is full, so it was not asked.
    """

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
