"""What is remembered of a turn: where its KV lies, and what the next turn must be to use it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        params: The engine's transfer parameters; None with leases.
        history: The end of the request that was answered; None when only the id counts.
        answer: What was generated; None with leases.
    """

    engine: str
    generation: int
    stored_at: float
    turns: int = 1
    lease: str | None = None
    params: Mapping[str, Any] | None = None
    history: Extension | None = None
    answer: Answer | None = None

    @property
    def size(self) -> int:
        """Estimated bytes it keeps alive."""
        blocks = 0 if self.params is None else 32 * sum(_items(value) for value in self.params.values())
        return _ENTRY_BYTES + blocks


def _items(value: object) -> int:
    if isinstance(value, list):
        return 1 + sum(_items(item) for item in value)
    return 1 + sys.getsizeof(value) // 64 if isinstance(value, str) else 1
