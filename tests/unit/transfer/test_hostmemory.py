"""Memory is pinned only where this process may read and write it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from kvduplex_transfer.errors import InvalidDescriptorError
from kvduplex_transfer.hostmemory import check_mapped, unmapped_part, writable_ranges
from kvduplex_transfer.interface import MemoryRegion

MAPS = """\
1000-3000 rw-p 00000000 00:00 0          [heap]
3000-4000 rw-s 00000000 00:01 12         /dev/shm/blocks
5000-6000 r--p 00000000 08:01 99         /usr/lib/libc.so
6000-7000 rw-p 00000000 00:00 0
7000-8000 ---p 00000000 00:00 0
"""


def test_only_readable_and_writable_ranges_count_and_neighbours_join() -> None:
    assert writable_ranges(MAPS) == [(0x1000, 0x4000), (0x6000, 0x7000)]


@pytest.mark.parametrize(
    ("address", "length", "missing"),
    [
        (0x1000, 0x3000, None),
        (0x2FFF, 2, None),
        (0x3000, 0x1001, 0x4000),
        (0x4000, 1, 0x4000),
        (0x5000, 1, 0x5000),
        (0x6FFF, 2, 0x7000),
        (0x0FFF, 10, 0x0FFF),
    ],
)
def test_the_first_missing_byte_is_found(address: int, length: int, missing: int | None) -> None:
    assert unmapped_part(MemoryRegion(address, length), writable_ranges(MAPS)) == missing


def test_an_array_is_mapped_and_page_zero_is_not() -> None:
    buffer = np.zeros(1 << 16, dtype=np.uint8)
    check_mapped([MemoryRegion(buffer.ctypes.data, buffer.nbytes)])

    with pytest.raises(InvalidDescriptorError, match=r"0x10 is not mapped readable and writable"):
        check_mapped([MemoryRegion(0x10, 8)])


def test_read_only_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8192))
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as writable,
    ):
        anchor = ctypes.c_char.from_buffer(writable)
        address = ctypes.addressof(anchor)
        check_mapped([MemoryRegion(address, 8192)])
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ) == 0
        with pytest.raises(InvalidDescriptorError, match=f"{address:#x} is not mapped"):
            check_mapped([MemoryRegion(address, 8192)])
        assert libc.mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        del anchor
