"""Block lists as arrays say the same as block lists of objects."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_transfer.blocks import BlockArray, descriptors
from kvduplex_transfer.errors import InvalidDescriptorError
from kvduplex_transfer.interface import BlockRef

word = st.integers(0, (1 << 64) - 1)
refs = st.lists(st.builds(BlockRef, word, word, word), min_size=1, max_size=8)


@given(blocks=refs)
def test_an_array_holds_what_it_was_made_from(blocks: list[BlockRef]) -> None:
    array = BlockArray(descriptors(blocks))

    assert list(array) == blocks
    assert len(array) == len(blocks)
    assert array[0] == blocks[0]
    assert list(array[1:]) == blocks[1:]
    assert array == BlockArray(descriptors(tuple(blocks)))
    assert hash(array) == hash(BlockArray(array.rows.copy()))
    assert descriptors(array) is array.rows


def test_strided_blocks_are_those_of_a_cache_layer() -> None:
    array = BlockArray.strided(0x7F00_0000_0000, [3, 0], stride=4096, length=1024, device_id=2)

    assert list(array) == [BlockRef(0x7F00_0000_3000, 1024, 2), BlockRef(0x7F00_0000_0000, 1024, 2)]
    assert repr(array) == "BlockArray(2 blocks, 2048 bytes)"


def test_other_shapes_are_refused() -> None:
    with pytest.raises(InvalidDescriptorError, match=r"shape \(4,\), expected \(n, 3\)"):
        BlockArray(np.arange(4))
    with pytest.raises(InvalidDescriptorError, match=r"shape \(2, 5\)"):
        BlockArray(np.zeros((2, 5)))


@pytest.mark.parametrize("block", [BlockRef(-1, 1), BlockRef(1, -1), BlockRef(1 << 64, 1), BlockRef(1, 1, -1)])
def test_numbers_out_of_range_are_refused(block: BlockRef) -> None:
    with pytest.raises(InvalidDescriptorError, match="no unsigned 64-bit integer"):
        descriptors([block])


def test_an_array_differs_from_other_things() -> None:
    assert BlockArray([[1, 2, 3]]) != [BlockRef(1, 2, 3)]
