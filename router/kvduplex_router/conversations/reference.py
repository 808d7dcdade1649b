"""What is remembered of a turn: where its KV lies, and what the next turn must be to use it."""

from __future__ import annotations

from dataclasses import dataclass

from kvduplex_router.conversations.answer import Answer
from kvduplex_router.conversations.history import Extension

__all__ = ["Reference"]

_ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class Reference:
    """A handle on the KV a decode engine holds, good for one use.

    Attributes:
        engine: Name of the decode engine.
        generation: How often that engine had changed its identity by then.
        stored_at: Monotonic seconds.
        turns: Turns this conversation has had.
        lease: Lease id; None with stock engines.
        params: Transfer parameters for the prefill engine of the next turn, as JSON; None with leases.
        history: The end of the request that was answered; None when only the id counts.
        answer: What was generated; None with leases.
    """

    engine: str
    generation: int
    stored_at: float
    turns: int = 1
    lease: str | None = None
    params: bytes | None = None
    history: Extension | None = None
    answer: Answer | None = None

    @property
    def size(self) -> int:
        """Estimated bytes it keeps alive."""
        return _ENTRY_BYTES + (0 if self.params is None else len(self.params))
