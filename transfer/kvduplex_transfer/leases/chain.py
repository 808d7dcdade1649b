"""Block-hash chains: the proof that two engines mean the same tokens.

An engine hashes each full block together with the hash of the block before it, so equal hashes at one position prove
equal tokens, adapters, salts and media at every position up to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from kvduplex_transfer.leases.errors import InvalidLeaseError

__all__ = ["MAX_HASH_SIZE", "MIN_HASH_SIZE", "HashChain"]

MIN_HASH_SIZE: Final = 16
"""Bytes of the shortest hash that counts as proof."""

MAX_HASH_SIZE: Final = 32
"""Bytes of the longest hash a message may carry."""


@dataclass(frozen=True, slots=True)
class HashChain:
    """A chain of equally long block hashes.

    Attributes:
        packed: The hashes end to end, first block first.
        hash_size: Bytes of each.

    Raises:
        InvalidLeaseError: `packed` is not a whole number of hashes, or the hash size is out of range.
    """

    packed: bytes
    hash_size: int = 32

    def __post_init__(self) -> None:
        if not MIN_HASH_SIZE <= self.hash_size <= MAX_HASH_SIZE:
            raise InvalidLeaseError(f"hash size {self.hash_size}: expected {MIN_HASH_SIZE} to {MAX_HASH_SIZE} bytes")
        if len(self.packed) % self.hash_size:
            raise InvalidLeaseError(
                f"chain of {len(self.packed)} bytes: expected a multiple of the hash size {self.hash_size}"
            )

    @classmethod
    def of(cls, hashes: Iterable[bytes]) -> Self:
        """Pack `hashes`; their length is that of the first.

        Raises:
            InvalidLeaseError: Their lengths differ or are out of range.
        """
        blocks = list(hashes)
        size = len(blocks[0]) if blocks else 32
        if any(len(block) != size for block in blocks):
            raise InvalidLeaseError("block hashes of one chain differ in length")
        return cls(b"".join(blocks), size)

    def __len__(self) -> int:
        return len(self.packed) // self.hash_size

    def at(self, position: int) -> bytes:
        """The hash of the block at `position`, 0 being the first."""
        return self.packed[position * self.hash_size : (position + 1) * self.hash_size]

    def prefix(self, length: int) -> Self:
        """The chain of the first `length` blocks."""
        return type(self)(self.packed[: length * self.hash_size], self.hash_size)

    def common_length(self, other: HashChain) -> int:
        """Blocks, from the first on, that both chains prove equal.

        Chaining makes equality monotone: positions agree up to the first difference and nowhere after it, so a binary
        search over single comparisons finds the end.
        """
        if self.hash_size != other.hash_size:
            return 0
        low, high = 0, min(len(self), len(other))
        while low < high:
            middle = (low + high) // 2
            if self.at(middle) == other.at(middle):
                low = middle + 1
            else:
                high = middle
        return low
