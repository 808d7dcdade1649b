"""Block lists as arrays: what a read is made of, checked and handed to NIXL without a Python object per block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvduplex_transfer.errors import InvalidDescriptorError
from kvduplex_transfer.interface import BlockRef

__all__ = ["BlockArray", "DescriptorArray", "descriptors"]

DescriptorArray = NDArray[np.uint64]
"""Shape (n, 3): address, length in bytes, device ordinal; the layout NIXL takes."""

_FIELDS = 3


class BlockArray(Sequence[BlockRef]):
    """A sequence of `BlockRef` held as one array, for long lists: 4,096 blocks cost microseconds, not milliseconds.

    Args:
        rows: Shape (n, 3): address, length, device ordinal. Not copied when it already is a uint64 array; it must
            not be changed afterwards.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: ArrayLike) -> None:
        array = np.ascontiguousarray(rows, dtype=np.uint64)
        if array.ndim != 2 or array.shape[1] != _FIELDS:  # noqa: PLR2004
            raise InvalidDescriptorError(
                f"block array has shape {array.shape}, expected (n, 3): address, length, device"
            )
        self._rows = array

    @classmethod
    def strided(cls, base: int, indices: ArrayLike, *, stride: int, length: int, device_id: int = 0) -> BlockArray:
        """Blocks at ``base + index * stride``, each `length` bytes: the blocks of one layer of a KV cache."""
        index = np.asarray(indices, dtype=np.uint64).reshape(-1)
        rows = np.empty((index.size, _FIELDS), dtype=np.uint64)
        rows[:, 0] = np.uint64(base) + index * np.uint64(stride)
        rows[:, 1] = length
        rows[:, 2] = device_id
        return cls(rows)

    @property
    def rows(self) -> DescriptorArray:
        """The array itself; treat it as read-only."""
        return self._rows

    @overload
    def __getitem__(self, index: int) -> BlockRef: ...
    @overload
    def __getitem__(self, index: slice) -> BlockArray: ...
    def __getitem__(self, index: int | slice) -> BlockRef | BlockArray:
        if isinstance(index, slice):
            return BlockArray(self._rows[index])
        address, length, device_id = self._rows[index].tolist()
        return BlockRef(address, length, device_id)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockArray):
            return bool(np.array_equal(self._rows, other._rows))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._rows.tobytes())

    def __repr__(self) -> str:
        return f"BlockArray({len(self)} blocks, {int(self._rows[:, 1].sum())} bytes)"


def descriptors(blocks: Sequence[BlockRef]) -> DescriptorArray:
    """`blocks` as an array, without a copy when they already are one.

    Raises:
        InvalidDescriptorError: A number is negative or does not fit in 64 bits.
    """
    if isinstance(blocks, BlockArray):
        return blocks.rows
    try:
        flat = np.fromiter(_fields(blocks), dtype=np.uint64, count=_FIELDS * len(blocks))
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidDescriptorError(
            f"block list holds a number that is no unsigned 64-bit integer: {error}"
        ) from error
    return flat.reshape(-1, _FIELDS)


def _fields(blocks: Iterable[BlockRef]) -> Iterable[Any]:
    return (field for block in blocks for field in (block.address, block.length, block.device_id))
