"""Descriptors that do not fit registered memory are refused in words, before native code sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvduplex_transfer.errors import InvalidDescriptorError, TransferError, UnknownPeerError
from kvduplex_transfer.interface import BlockRef, MemoryRegion, MemoryType, Peer, Region, TransferAgent, TransferHandle

if TYPE_CHECKING:
    from tests.contract.conftest import Connect, Memory

PAGE = 4096


@pytest.mark.parametrize(
    ("offset", "length", "device"),
    [(-1, 10, 0), (PAGE - 5, 10, 0), (PAGE, 1, 0), (0, PAGE + 1, 0), (0, 1 << 63, 0), (1 << 20, 8, 0), (0, 10, 1)],
)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_a_block_outside_registered_memory_is_refused(
    reader: TransferAgent,
    owner: TransferAgent,
    memory: Callable[..., Memory],
    connect: Connect,
    offset: int,
    length: int,
    device: int,
    side: str,
) -> None:
    local, far = memory(reader, PAGE, seed=50), memory(owner, PAGE)
    blocks = {"local": [local.block(0, 10)], "remote": [far.block(0, 10)]}
    base = local.address if side == "local" else far.address
    blocks[side].append(BlockRef(base + offset, length, device))
    other = "remote" if side == "local" else "local"
    blocks[other].append(BlockRef(blocks[other][0].address, length, 0))
    before = local.bytes.copy()

    with pytest.raises(InvalidDescriptorError, match=r"lies outside registered memory"):
        reader.read(connect(reader, owner), blocks["remote"], blocks["local"])

    assert np.array_equal(local.bytes, before)


def test_a_block_across_two_adjacent_regions_is_refused(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    far, whole = memory(owner, 2 * PAGE), np.zeros(2 * PAGE, dtype=np.uint8)
    address = int(whole.ctypes.data)
    regions = reader.register([MemoryRegion(address, PAGE), MemoryRegion(address + PAGE, PAGE)])

    with pytest.raises(InvalidDescriptorError, match="local block 0"):
        reader.read(connect(reader, owner), [far.block(0, 2 * PAGE)], [BlockRef(address, 2 * PAGE)])

    reader.deregister(regions)


@pytest.mark.parametrize(
    ("remote", "local"),
    [([], []), ([8], []), ([8, 8], [8]), ([8], [16]), ([0], [0])],
    ids=["empty", "no local", "one too few", "other length", "no bytes"],
)
def test_lists_that_do_not_pair_up_are_refused(
    reader: TransferAgent,
    owner: TransferAgent,
    memory: Callable[..., Memory],
    connect: Connect,
    remote: list[int],
    local: list[int],
) -> None:
    near, far = memory(reader, PAGE), memory(owner, PAGE)

    with pytest.raises(InvalidDescriptorError, match="at least 1"):
        reader.read(
            connect(reader, owner),
            [far.block(0, length) for length in remote],
            [near.block(0, length) for length in local],
        )


@pytest.mark.parametrize("block", [BlockRef(-1, 8), BlockRef(1 << 64, 8), BlockRef(0, -8)])
def test_numbers_that_are_no_addresses_are_refused(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect, block: BlockRef
) -> None:
    near = memory(reader, PAGE)

    with pytest.raises(InvalidDescriptorError):
        reader.read(connect(reader, owner), [block], [near.block(0, 8)])


def test_an_unknown_peer_is_refused(reader: TransferAgent, memory: Callable[..., Memory]) -> None:
    near = memory(reader, PAGE)

    with pytest.raises(UnknownPeerError, match="add_peer"):
        reader.read(Peer("nobody"), [BlockRef(1, 8)], [near.block(0, 8)])
    with pytest.raises(UnknownPeerError, match="add_peer"):
        reader.notify(Peer("nobody"), b"hello")


def test_memory_taken_back_can_no_longer_be_read_into(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    near, far = memory(reader, PAGE), memory(owner, PAGE)
    reader.deregister(near.regions)
    reader.deregister(near.regions)

    with pytest.raises(InvalidDescriptorError, match="outside registered memory"):
        reader.read(connect(reader, owner), [far.block(0, 8)], [near.block(0, 8)])


@pytest.mark.parametrize(
    "region",
    [
        MemoryRegion(PAGE, PAGE),
        MemoryRegion(1 << 62, PAGE),
        MemoryRegion(0, PAGE),
        MemoryRegion(-PAGE, PAGE),
        MemoryRegion((1 << 64) - PAGE, 2 * PAGE),
    ],
    ids=["unmapped", "far away", "null", "negative", "past the end"],
)
def test_memory_that_is_not_there_is_refused(reader: TransferAgent, region: MemoryRegion) -> None:
    with pytest.raises(InvalidDescriptorError):
        reader.register([region])


def test_registering_is_all_or_nothing(reader: TransferAgent) -> None:
    buffer = np.zeros(4 * PAGE, dtype=np.uint8)
    address = int(buffer.ctypes.data)
    fine = MemoryRegion(address, PAGE)

    for wrong in (MemoryRegion(address + PAGE, 0), MemoryRegion(address + 10, 10), MemoryRegion(PAGE, PAGE)):
        with pytest.raises(InvalidDescriptorError):
            reader.register([fine, wrong])

    reader.deregister(reader.register([fine]))


def test_an_overlap_is_refused_and_names_the_region(reader: TransferAgent, memory: Callable[..., Memory]) -> None:
    near = memory(reader, PAGE)

    with pytest.raises(InvalidDescriptorError, match=f"overlaps the registered \\[{near.address:#x}"):
        reader.register([MemoryRegion(near.address + 100, 8)])


def test_device_memory_that_is_none_is_refused(reader: TransferAgent, memory: Callable[..., Memory]) -> None:
    buffer = np.zeros(PAGE, dtype=np.uint8)

    with pytest.raises(TransferError):
        reader.register([MemoryRegion(int(buffer.ctypes.data), PAGE, 0, MemoryType.VRAM)])


def test_regions_and_handles_of_other_agents_are_refused(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    near, far = memory(reader, PAGE), memory(owner, PAGE)
    handle = reader.read(connect(reader, owner), [far.block(0, 8)], [near.block(0, 8)])
    reader.wait(handle, 20.0)

    for region in (*far.regions, Region(near.regions[0].id, near.regions[0].memory)):
        with pytest.raises(InvalidDescriptorError, match="was not registered with"):
            reader.deregister([region])
    for foreign in (handle, TransferHandle(handle.id, handle.peer, handle.bytes)):
        with pytest.raises(InvalidDescriptorError, match="is not of agent"):
            owner.poll(foreign)
    reader.release(handle)
