"""Blocks are found in registered regions exactly when a plain comparison finds them there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_transfer.blocks import descriptors
from kvduplex_transfer.errors import InvalidDescriptorError
from kvduplex_transfer.interface import BlockRef, MemoryRegion, MemoryType
from kvduplex_transfer.regions import RegionMap

regions = st.lists(
    st.builds(
        MemoryRegion,
        address=st.integers(1, 200),
        length=st.integers(1, 40),
        device_id=st.integers(0, 1),
        memory_type=st.sampled_from(MemoryType),
    ),
    max_size=12,
)
blocks = st.lists(
    st.builds(BlockRef, address=st.integers(0, 260), length=st.integers(1, 30), device_id=st.integers(0, 2)),
    min_size=1,
    max_size=6,
)


def overlap(one: MemoryRegion, other: MemoryRegion) -> bool:
    same = (one.memory_type, one.device_id) == (other.memory_type, other.device_id)
    return same and one.address < other.address + other.length and other.address < one.address + one.length


def holds(region: MemoryRegion, block: BlockRef) -> bool:
    inside = region.address <= block.address and block.address + block.length <= region.address + region.length
    return region.device_id == block.device_id and inside


@given(candidates=regions, wanted=blocks, gone=st.sets(st.integers(0, 11)))
def test_the_map_agrees_with_a_plain_search(
    candidates: list[MemoryRegion], wanted: list[BlockRef], gone: set[int]
) -> None:
    table: RegionMap[int] = RegionMap()
    kept: dict[int, MemoryRegion] = {}
    for key, region in enumerate(candidates):
        if any(overlap(region, other) for other in kept.values()):
            with pytest.raises(InvalidDescriptorError, match="overlaps"):
                table.add(key, region)
        else:
            table.add(key, region)
            kept[key] = region
    for key in gone & kept.keys():
        table.remove(kept.pop(key))

    homes = {
        memory_type: [
            {key for key, region in kept.items() if region.memory_type is memory_type and holds(region, block)}
            for block in wanted
        ]
        for memory_type in MemoryType
    }
    expected = next((kind for kind in MemoryType if all(homes[kind])), None)
    if expected is None:
        with pytest.raises(InvalidDescriptorError):
            table.locate(descriptors(wanted), side="local")
    else:
        located = table.locate(descriptors(wanted), side="local")
        assert located.memory_type is expected
        assert located.regions == frozenset(set.union(*homes[expected]))


def test_the_message_names_the_block_and_what_is_near() -> None:
    table: RegionMap[int] = RegionMap()
    table.add(1, MemoryRegion(0x1000, 0x1000))
    table.add(2, MemoryRegion(0x9000, 0x1000))

    with pytest.raises(
        InvalidDescriptorError,
        match=r"remote block 1 \(address 0x8ff0, 32 bytes, device 0\) .* nearest region is \[0x9000, 0xa000\)",
    ):
        table.locate(descriptors([BlockRef(0x1000, 16), BlockRef(0x8FF0, 32)]), side="remote")


def test_a_device_without_memory_is_said_to_have_none() -> None:
    table: RegionMap[int] = RegionMap()
    table.add(1, MemoryRegion(0x1000, 0x1000))

    with pytest.raises(InvalidDescriptorError, match="nothing is registered on device 3"):
        table.locate(descriptors([BlockRef(0x1000, 16, 3)]), side="local")


def test_memory_types_are_not_mixed_in_one_list() -> None:
    table: RegionMap[int] = RegionMap()
    table.add(1, MemoryRegion(0x1000, 0x1000))
    table.add(2, MemoryRegion(0x5000, 0x1000, memory_type=MemoryType.VRAM))

    with pytest.raises(InvalidDescriptorError, match="local blocks mix memory types"):
        table.locate(descriptors([BlockRef(0x1000, 16), BlockRef(0x5000, 16)]), side="local")


def test_an_address_near_the_end_of_memory_does_not_wrap_around() -> None:
    table: RegionMap[int] = RegionMap()
    table.add(1, MemoryRegion((1 << 64) - 8192, 8191))
    rows = np.array([[(1 << 64) - 16, 64, 0]], dtype=np.uint64)

    with pytest.raises(InvalidDescriptorError, match="lies outside"):
        table.locate(rows, side="local")


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (MemoryRegion(0x1000, 0), "length 0, expected at least 1"),
        (MemoryRegion(0x1000, -5), "length -5"),
        (MemoryRegion(0, 10), "64-bit address space"),
        (MemoryRegion((1 << 64) - 5, 10), "64-bit address space"),
        (MemoryRegion(0x1000, 10, device_id=-1), "device -1, expected 0 or more"),
    ],
)
def test_a_region_that_cannot_be_is_refused(region: MemoryRegion, message: str) -> None:
    with pytest.raises(InvalidDescriptorError, match=message):
        RegionMap[int]().add(1, region)
