"""Which memory is registered, and whether blocks lie inside it. Pure; the checks native code does not make."""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvduplex_transfer.blocks import DescriptorArray
from kvduplex_transfer.errors import InvalidDescriptorError
from kvduplex_transfer.interface import MemoryRegion, MemoryType

__all__ = ["Located", "RegionMap"]

_END_OF_MEMORY = 1 << 64
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Located(Generic[_Key]):
    """Where a block list lies: its one memory type and the regions it touches."""

    memory_type: MemoryType
    regions: frozenset[_Key]


@dataclass(slots=True)
class _Space(Generic[_Key]):
    """Sorted, disjoint regions of one memory type on one device."""

    starts: list[int]
    ends: list[int]
    keys: list[_Key]

    def home(self, rows: DescriptorArray) -> _Key | None:
        """The one region that holds all of `rows`, if one does: the common case, decided by their extremes."""
        lowest, highest = int(rows[:, 0].min()), int(rows[:, 0].max())
        index = bisect.bisect_right(self.starts, lowest) - 1
        if index < 0 or highest + int(rows[:, 1].max()) > self.ends[index]:
            return None
        return self.keys[index]

    def arrays(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        return np.array(self.starts, dtype=np.uint64), np.array(self.ends, dtype=np.uint64)


class RegionMap(Generic[_Key]):
    """Disjoint registered regions, found by address.

    Adjacent regions stay separate: a block must lie within one, because NIXL pins and addresses each on its own.
    """

    def __init__(self) -> None:
        self._spaces: dict[tuple[MemoryType, int], _Space[_Key]] = {}
        self._arrays: dict[tuple[MemoryType, int], tuple[NDArray[np.uint64], NDArray[np.uint64]]] = {}

    def add(self, key: _Key, memory: MemoryRegion) -> None:
        """Insert a region.

        Raises:
            InvalidDescriptorError: It is empty, leaves the address space, or overlaps one that is there.
        """
        _check_extent(memory)
        place = (memory.memory_type, memory.device_id)
        space = self._spaces.setdefault(place, _Space([], [], []))
        end = memory.address + memory.length
        index = bisect.bisect_right(space.starts, memory.address)
        for neighbour in (index - 1, index):
            if 0 <= neighbour < len(space.starts):
                _check_disjoint(memory, space.starts[neighbour], space.ends[neighbour])
        space.starts.insert(index, memory.address)
        space.ends.insert(index, end)
        space.keys.insert(index, key)
        self._arrays.pop(place, None)

    def remove(self, memory: MemoryRegion) -> None:
        """Take out a region that was added; one that is not there is ignored."""
        place = (memory.memory_type, memory.device_id)
        space = self._spaces.get(place)
        if space is None:
            return
        index = bisect.bisect_left(space.starts, memory.address)
        if index < len(space.starts) and space.starts[index] == memory.address:
            del space.starts[index], space.ends[index], space.keys[index]
            self._arrays.pop(place, None)

    def locate(self, blocks: DescriptorArray, *, side: str) -> Located[_Key]:
        """Find the regions of every block.

        Args:
            blocks: Shape (n, 3); n at least 1.
            side: ``local`` or ``remote``, for the message.

        Raises:
            InvalidDescriptorError: A block lies in no region, or the list mixes memory types.
        """
        for memory_type in MemoryType:
            keys = self._keys(memory_type, blocks)
            if keys is not None:
                return Located(memory_type, keys)
        raise InvalidDescriptorError(self._explain(blocks, side))

    def _keys(self, memory_type: MemoryType, blocks: DescriptorArray) -> frozenset[_Key] | None:
        """Keys of the regions that hold every block, or None when one lies outside."""
        first = int(blocks[0, 2])
        if (blocks[:, 2] == first).all():
            return self._keys_on(memory_type, first, blocks)
        keys: frozenset[_Key] = frozenset()
        for device in np.unique(blocks[:, 2]).tolist():
            found = self._keys_on(memory_type, device, blocks[blocks[:, 2] == device])
            if found is None:
                return None
            keys |= found
        return keys

    def _keys_on(self, memory_type: MemoryType, device: int, rows: DescriptorArray) -> frozenset[_Key] | None:
        place = (memory_type, device)
        space = self._spaces.get(place)
        if space is None or not space.starts:
            return None
        home = space.home(rows)
        return frozenset((home,)) if home is not None else self._scattered(place, space, rows)

    def _scattered(
        self, place: tuple[MemoryType, int], space: _Space[_Key], rows: DescriptorArray
    ) -> frozenset[_Key] | None:
        starts, ends = self._bounds(place)
        index = np.searchsorted(starts, rows[:, 0], side="right")
        if int(index.min()) == 0:
            return None
        end = ends[index - 1]
        # Compared by what is left of the region, since address + length could wrap around.
        if ((rows[:, 0] >= end) | (rows[:, 1] > end - rows[:, 0])).any():
            return None
        return frozenset(space.keys[i - 1] for i in np.unique(index).tolist())

    def _bounds(self, place: tuple[MemoryType, int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        bounds = self._arrays.get(place)
        if bounds is None:
            bounds = self._arrays[place] = self._spaces[place].arrays()
        return bounds

    def _explain(self, blocks: DescriptorArray, side: str) -> str:
        for position, (address, length, device) in enumerate(blocks.tolist()):
            row = blocks[position : position + 1]
            if all(self._keys_on(memory_type, device, row) is None for memory_type in MemoryType):
                return (
                    f"{side} block {position} (address {address:#x}, {length} bytes, device {device}) lies outside "
                    f"registered memory{self._nearest(address, device)}"
                )
        return f"{side} blocks mix memory types; read each type on its own"

    def _nearest(self, address: int, device: int) -> str:
        bounds = [
            (start, end)
            for (_, ordinal), space in self._spaces.items()
            if ordinal == device
            for start, end in zip(space.starts, space.ends, strict=True)
        ]
        if not bounds:
            return f"; nothing is registered on device {device}"
        start, end = min(bounds, key=lambda bound: min(abs(address - bound[0]), abs(address - bound[1])))
        return f"; the nearest region is [{start:#x}, {end:#x})"


def _check_extent(memory: MemoryRegion) -> None:
    if memory.length <= 0:
        raise InvalidDescriptorError(f"region at {memory.address:#x} has length {memory.length}, expected at least 1")
    if memory.address <= 0 or memory.address + memory.length > _END_OF_MEMORY:
        raise InvalidDescriptorError(
            f"region at {memory.address:#x} of {memory.length} bytes does not lie in a 64-bit address space"
        )
    if memory.device_id < 0:
        raise InvalidDescriptorError(f"region at {memory.address:#x} has device {memory.device_id}, expected 0 or more")


def _check_disjoint(memory: MemoryRegion, start: int, end: int) -> None:
    if memory.address < end and start < memory.address + memory.length:
        raise InvalidDescriptorError(
            f"region [{memory.address:#x}, {memory.address + memory.length:#x}) overlaps the registered "
            f"[{start:#x}, {end:#x}); deregister that first"
        )
