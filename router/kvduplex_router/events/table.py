"""A compact map from 64-bit keys to rows of 64-bit words, for millions of entries.

Open addressing with linear probing over numpy arrays: a key and its row cost ``8 + 8 * words`` bytes a slot, where a
dictionary of integers costs several times that. Entries are reached through memoryviews, which cost little more than a
list; numpy holds the memory and moves it when a table grows. Deleting closes its gap, so a table does not age.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

__all__ = ["TableFullError", "WordTable", "Words"]

Words = npt.NDArray[np.uint64]

_SMALLEST: Final = 64
_FULL_NUM: Final = 3
_FULL_DEN: Final = 4
"""A table is at most three quarters full: beyond that, runs of occupied slots grow long."""


class TableFullError(Exception):
    """A table of fixed size has as many entries as it may."""


class WordTable:
    """See the module; the key 0 is not allowed, and a row of zeros is an entry like any other.

    Args:
        capacity: Entries to make room for.
        words: Words per row.
        fixed: Refuse entries beyond `capacity` instead of growing. Memory is claimed from the system as it is used.
    """

    def __init__(self, capacity: int = 0, *, words: int = 1, fixed: bool = False) -> None:
        self._words = words
        self._row_bytes = 8 * words
        self._limit = capacity if fixed else 0
        self._allocate(max(_SMALLEST, 1 << (capacity * _FULL_DEN // _FULL_NUM).bit_length()))

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return int(self._keys.nbytes + self._rows.nbytes)

    def get(self, key: int, word: int = 0) -> int | None:
        """One word of the key's row; None when it is absent."""
        slot = self._find(key)
        return None if slot < 0 else self._row[slot * self._words + word]

    def put(self, key: int, value: int, word: int = 0) -> None:
        """Set one word of the key's row, adding the key if need be.

        Raises:
            TableFullError: The table is of fixed size and full.
        """
        at = self._slot_for(key) * self._words + word  # first, for it may replace the arrays
        self._row[at] = value

    def set_bits(self, key: int, bits: int, word: int = 0) -> None:
        """Set bits in one word of the key's row, adding the key if need be.

        Raises:
            TableFullError: The table is of fixed size and full.
        """
        at = self._slot_for(key) * self._words + word
        self._row[at] |= bits

    def clear_bits(self, key: int, bits: int, word: int = 0) -> None:
        """Clear bits in one word of the key's row; a row without any bit goes."""
        slot = self._find(key)
        if slot < 0:
            return
        row, at = self._row, slot * self._words
        row[at + word] &= ~bits
        if not row[at + word] and not any(row[at : at + self._words]):
            self._delete(slot)

    def put_new(self, key: int, value: int) -> bool:
        """Set the first word of the row of a key that is absent; False, and nothing is done, when it is not."""
        held, mask = self._key, self._mask
        slot = key & mask
        while (found := held[slot]) != key:
            if not found:
                at = self._add(key, slot) * self._words
                self._row[at] = value
                return True
            slot = (slot + 1) & mask
        return False

    def pop(self, key: int) -> int | None:
        """Remove the key and return the first word of its row; None when it is absent."""
        slot = self._find(key)
        if slot < 0:
            return None
        value: int = self._row[slot * self._words]
        self._delete(slot)
        return value

    def row(self, key: int) -> int:
        """The key's row as one integer, first word lowest; 0 when it is absent."""
        held, mask = self._key, self._mask
        slot = key & mask
        while (found := held[slot]) != key:
            if not found:
                return 0
            slot = (slot + 1) & mask
        at = slot * self._row_bytes
        return int.from_bytes(self._bytes[at : at + self._row_bytes], "little")

    def values(self) -> Iterator[int]:
        """First words of all rows."""
        occupied = np.nonzero(self._keys)[0]
        return iter(self._rows.reshape(-1, self._words)[occupied, 0].tolist())

    def _allocate(self, slots: int) -> None:
        self._mask = slots - 1
        self._count = 0
        self._keys: Words = np.zeros(slots, np.uint64)
        self._rows: Words = np.zeros(slots * self._words, np.uint64)
        self._key: Any = memoryview(cast(Any, self._keys))
        self._row: Any = memoryview(cast(Any, self._rows))
        self._bytes: Any = self._row.cast("B")

    def _find(self, key: int) -> int:
        held, mask = self._key, self._mask
        slot = key & mask
        while (found := held[slot]) != key:
            if not found:
                return -1
            slot = (slot + 1) & mask
        return slot

    def _slot_for(self, key: int) -> int:
        held, mask = self._key, self._mask
        slot = key & mask
        while (found := held[slot]) != key:
            if not found:
                return self._add(key, slot)
            slot = (slot + 1) & mask
        return slot

    def _add(self, key: int, slot: int) -> int:
        if self._limit:
            if self._count >= self._limit:
                raise TableFullError
        elif _FULL_DEN * self._count > _FULL_NUM * self._mask:
            self._grow()
            return self._slot_for(key)
        self._count += 1
        self._key[slot] = key
        return slot

    def _delete(self, hole: int) -> None:
        """Empty a slot and move later entries of its cluster up, each as far as its own place allows."""
        held, mask, words, rows = self._key, self._mask, self._words, self._row
        self._count -= 1
        slot = hole
        while True:
            slot = (slot + 1) & mask
            key = held[slot]
            if not key:
                break
            if (slot - (key & mask)) & mask >= (slot - hole) & mask:
                held[hole] = key
                rows[hole * words : (hole + 1) * words] = rows[slot * words : (slot + 1) * words]
                hole = slot
        held[hole] = 0
        for word in range(hole * words, (hole + 1) * words):
            rows[word] = 0

    def _grow(self) -> None:
        occupied = np.nonzero(self._keys)[0]
        keys, rows = self._keys[occupied], self._rows.reshape(-1, self._words)[occupied]
        self._allocate(2 * (self._mask + 1))
        self._place(keys, rows)

    def _place(self, keys: Words, rows: Words) -> None:
        """Enter keys that are all new: round by round those whose slot is free and wanted by no earlier one."""
        self._count += len(keys)
        table = self._rows.reshape(-1, self._words)
        slots = (keys & np.uint64(self._mask)).astype(np.int64)
        while len(keys):
            free = np.nonzero(self._keys[slots] == 0)[0]
            _, first = np.unique(slots[free], return_index=True)
            placed = free[first]
            self._keys[slots[placed]] = keys[placed]
            table[slots[placed]] = rows[placed]
            left = np.ones(len(keys), bool)
            left[placed] = False
            keys, rows, slots = keys[left], rows[left], (slots[left] + 1) & self._mask
