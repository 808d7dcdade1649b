"""Where references wait for the next turn: bounded by count, bytes and age, each taken at most once."""

from __future__ import annotations

from collections import OrderedDict

from kvduplex_router.clock import Clock
from kvduplex_router.conversations.reference import Reference

__all__ = ["MemoryStore"]


class MemoryStore:
    """References in this process, the least recently stored dropped first."""

    def __init__(self, *, max_count: int, max_bytes: int, max_age_s: float, clock: Clock) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._entries: OrderedDict[bytes, Reference] = OrderedDict()
        self._bytes = 0

    @property
    def count(self) -> int:
        """References held."""
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """Estimated bytes held."""
        return self._bytes

    def holds(self, key: bytes) -> bool:
        """Whether there is a reference."""
        return key in self._entries

    def take(self, key: bytes) -> Reference | None:
        """Remove and return the reference, if there is one."""
        return self._pop(key)

    def put(self, key: bytes, reference: Reference) -> list[Reference]:
        """Store a reference and return those it displaced: the key's former one, and any dropped to stay in bounds."""
        former = self._pop(key)
        displaced = [] if former is None else [former]
        self._entries[key] = reference
        self._bytes += reference.size
        while len(self._entries) > self._max_count or (self._bytes > self._max_bytes and len(self._entries) > 1):
            displaced.append(self._drop_oldest())
        return displaced

    def sweep(self) -> list[Reference]:
        """Drop and return what is too old; entries are in order of age, so this stops at the first young one."""
        limit = self._clock() - self._max_age_s
        dropped: list[Reference] = []
        while self._entries and next(iter(self._entries.values())).stored_at <= limit:
            dropped.append(self._drop_oldest())
        if dropped and not self._entries:
            self._entries = OrderedDict()  # an emptied one keeps the room of its largest day
        return dropped

    def _pop(self, key: bytes) -> Reference | None:
        reference = self._entries.pop(key, None)
        if reference is not None:
            self._bytes -= reference.size
        return reference

    def _drop_oldest(self) -> Reference:
        _, reference = self._entries.popitem(last=False)
        self._bytes -= reference.size
        return reference
