"""Memory to transfer from and into, whichever device it lies on."""

from __future__ import annotations

import mmap
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import numpy as np

from kvduplex_transfer.interface import MemoryRegion, MemoryType

__all__ = ["Buffer", "BufferSource", "HostBuffer", "HostMemory"]


class Buffer(Protocol):
    """Memory that its maker owns until `close`."""

    @property
    def region(self) -> MemoryRegion:
        """Where it lies."""

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy host bytes in."""

    def read(self, length: int, offset: int = 0) -> bytes:
        """Copy bytes out to the host."""

    def close(self) -> None:
        """Free it. It must not be registered any more. Idempotent."""


@runtime_checkable
class BufferSource(Protocol):
    """A backend that can hand out memory of its devices, for benchmarks and hardware tests."""

    def allocate(self, length: int, device_id: int = 0) -> Buffer:
        """Allocate `length` bytes on a device.

        Raises:
            BackendUnavailableError: The device or its runtime is missing, or has too little memory.
        """


class HostBuffer:
    """Anonymous host memory, page aligned.

    Args:
        length: Bytes.
    """

    def __init__(self, length: int) -> None:
        self._memory: mmap.mmap | None = mmap.mmap(-1, length)
        view = np.frombuffer(self._memory, dtype=np.uint8)
        self._region = MemoryRegion(int(view.ctypes.data), length, memory_type=MemoryType.DRAM)
        del view  # an exported view would keep the mapping open

    @property
    def region(self) -> MemoryRegion:
        """Where it lies."""
        return self._region

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy bytes in."""
        self._open()[offset : offset + len(data)] = data

    def read(self, length: int, offset: int = 0) -> bytes:
        """Copy bytes out."""
        return self._open()[offset : offset + length]

    def close(self) -> None:
        """Unmap it."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def __enter__(self) -> Self:
        """The buffer itself; leaving the block frees it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Free it."""
        self.close()

    def _open(self) -> mmap.mmap:
        if self._memory is None:
            raise ValueError("this buffer was closed")
        return self._memory


class HostMemory:
    """Hands out host memory. Satisfies `BufferSource`."""

    def allocate(self, length: int, device_id: int = 0) -> HostBuffer:
        """Allocate `length` bytes; `device_id` has no meaning here."""
        del device_id
        return HostBuffer(length)
