"""What is remembered of a turn: where its KV lies, and what the next turn must be to use it."""

from __future__ import annotations

import msgspec

from kvduplex_router.conversations.answer import Answer
from kvduplex_router.conversations.history import Extension

__all__ = ["Reference"]

_ENTRY_BYTES = 650  # measured: keys, digests, numbers and their places in dictionaries


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """A handle on the KV a decode engine holds, good for one use.

    Attributes:
        engine: Name of the decode engine.
        stored_at: Monotonic seconds of this machine.
        turns: Turns this conversation has had.
        identity: Who the engine said it was; None when it had not.
        lease: Lease id; None with stock engines.
        params: Transfer parameters for the prefill engine of the next turn, as JSON; None with leases.
        history: The end of the request that was answered; None when only the id counts.
        answer: What was generated; None with leases.
    """

    engine: str
    stored_at: float
    turns: int = 1
    identity: str | None = None
    lease: str | None = None
    params: bytes | None = None
    history: Extension | None = None
    answer: Answer | None = None

    @property
    def size(self) -> int:
        """Estimated bytes it keeps alive."""
        return _ENTRY_BYTES + (0 if self.params is None else len(self.params))
