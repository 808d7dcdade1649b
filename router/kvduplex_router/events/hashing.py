"""The router's own block hashes: 64 bits, chained from parent to child, over token ids.

Engines hash blocks in ways that depend on version, algorithm and seed. Recomputing the hashes from the token ids that
engines publish makes blocks of different engines comparable and needs no agreement with anybody: the values are good
in this process only. Python's keyed hash of bytes is the function, so no client can choose colliding prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final

__all__ = ["TOKEN_BYTES", "Extra", "chain", "root", "token_bytes"]

TOKEN_BYTES: Final = array("I").itemsize
_MASK: Final = (1 << 64) - 1

Extra = tuple[Any, ...] | None
"""What besides tokens makes a block's KV: adapter name, cache salt, images with their offsets."""


def token_bytes(ids: Iterable[Any]) -> bytes:
    """Token ids in the form that `chain` takes.

    Raises:
        TypeError: One is not an integer.
        OverflowError: One does not fit 32 bits.
    """
    return array("I", ids).tobytes()


def root(block_size: int, scope: str = "") -> int:
    """The parent of first blocks; blocks of different sizes or scopes never meet."""
    return hash(("root", block_size, scope)) & _MASK or 1


def chain(parent: int, tokens: bytes, block_size: int, extras: Sequence[Extra] | Extra = None) -> list[int]:
    """Hashes of the full blocks in `tokens`, each over its parent's.

    Args:
        parent: Hash of the block before them, or `root`.
        tokens: `token_bytes`; what does not fill a block is left out.
        block_size: Tokens per block.
        extras: One entry a block (a list), or the one that all blocks share (a tuple or None).
    """
    step = block_size * TOKEN_BYTES
    found: list[int] = []
    add = found.append
    starts = range(0, len(tokens) - step + 1, step)
    if extras is None:
        for start in starts:
            parent = hash((parent, tokens[start : start + step])) & _MASK or 1
            add(parent)
        return found
    each = repeat(extras) if isinstance(extras, tuple) else extras
    for start, extra in zip(starts, each, strict=False):
        piece = tokens[start : start + step]
        parent = hash((parent, piece) if extra is None else (parent, piece, extra)) & _MASK or 1
        add(parent)
    return found
