"""Whether host memory may be read and written by this process, before native code finds out by crashing.

NIXL's UCX backend (1.5.1) registers any address over TCP, mapped or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvduplex_transfer.errors import InvalidDescriptorError
from kvduplex_transfer.interface import MemoryRegion

__all__ = ["check_mapped", "unmapped_part", "writable_ranges"]


def check_mapped(regions: Iterable[MemoryRegion], *, maps: Path = Path("/proc/self/maps")) -> None:
    """Refuse host regions that are not wholly mapped, readable and writable.

    Raises:
        InvalidDescriptorError: One is not; names the first missing byte.
    """
    ranges = writable_ranges(maps.read_text())
    for region in regions:
        missing = unmapped_part(region, ranges)
        if missing is not None:
            raise InvalidDescriptorError(
                f"region [{region.address:#x}, {region.address + region.length:#x}) cannot be pinned: "
                f"{missing:#x} is not mapped readable and writable in this process"
            )


def writable_ranges(maps: str) -> list[tuple[int, int]]:
    """Readable and writable address ranges of a ``/proc/PID/maps``, ascending, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for line in maps.splitlines():
        bounds, permissions, *_ = line.split(maxsplit=2)
        if not permissions.startswith("rw"):
            continue
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges


def unmapped_part(region: MemoryRegion, ranges: Iterable[tuple[int, int]]) -> int | None:
    """First address of `region` outside all of `ranges`, or None when it lies inside one."""
    for start, end in ranges:
        if start <= region.address < end:
            return None if region.address + region.length <= end else end
    return region.address
