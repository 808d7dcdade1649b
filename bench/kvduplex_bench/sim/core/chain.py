"""Block hashes of simulated engines: a chain over token ids, 16 bytes a block, the same in every process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

__all__ = ["HASH_SIZE", "block_hashes", "root_of"]

HASH_SIZE: Final = 16
"""Bytes of a block hash."""


def root_of(*keys: str) -> bytes:
    """Where a chain starts: model, adapter, salt. Chains of different keys share no hash."""
    return blake2b("\x00".join(keys).encode(), digest_size=HASH_SIZE).digest()


def block_hashes(tokens: Sequence[int], block_size: int, root: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of the full blocks of `tokens`.

    Args:
        tokens: Token ids.
        block_size: Tokens of a block.
        root: Where the chain starts.
        known: Hashes of the first blocks, when they have been computed before.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    packed = array("I", tokens[len(hashes) * block_size :]).tobytes()
    width = block_size * array("I").itemsize
    for start in range(0, len(packed) - width + 1, width):
        parent = blake2b(parent + packed[start : start + width], digest_size=HASH_SIZE).digest()
        hashes.append(parent)
    return hashes
