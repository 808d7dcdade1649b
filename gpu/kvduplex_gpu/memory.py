"""GPU memory through the CUDA driver API, for benchmarks and hardware tests; engines allocate through torch.

No hardware has run this module yet.
"""

from __future__ import annotations

import ctypes

from kvduplex_transfer.errors import BackendUnavailableError
from kvduplex_transfer.interface import MemoryRegion, MemoryType

__all__ = ["CudaDriver", "GpuBuffer"]

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: copies into it are done when the call returns, as RDMA needs


class CudaDriver:
    """The CUDA driver of this process. It is initialised before a NIXL agent is opened, which looks for its contexts.

    Args:
        library: Name or path of libcuda.

    Raises:
        BackendUnavailableError: libcuda cannot be loaded, or finds no GPU.
    """

    def __init__(self, library: str = _LIBRARY) -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise BackendUnavailableError(
                f"{library} cannot be loaded ({error}); install the NVIDIA driver, see `kvduplex doctor --backend gpu`"
            ) from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._check(self._cuda.cuInit(0), "cuInit")

    def allocate(self, length: int, device_id: int = 0) -> GpuBuffer:
        """Allocate device memory.

        Args:
            length: Bytes.
            device_id: GPU, counted within those visible to this process.

        Raises:
            BackendUnavailableError: There is no such GPU, or it has too little memory.
        """
        self.enter(device_id)
        address = ctypes.c_uint64()
        status = self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(length))
        self._check(status, f"cuMemAlloc of {length} bytes on GPU {device_id}")
        flag = ctypes.c_int(1)
        self._check(
            self._cuda.cuPointerSetAttribute(ctypes.byref(flag), _SYNC_MEMOPS, address), "cuPointerSetAttribute"
        )
        return GpuBuffer(self, MemoryRegion(address.value, length, device_id, MemoryType.VRAM))

    def enter(self, device_id: int) -> None:
        """Make the primary context of a GPU this thread's own."""
        if device_id not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._check(self._cuda.cuDeviceGet(ctypes.byref(device), device_id), f"cuDeviceGet of GPU {device_id}")
            self._check(
                self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"a context on GPU {device_id}"
            )
            self._contexts[device_id] = context
        self._check(self._cuda.cuCtxSetCurrent(self._contexts[device_id]), f"cuCtxSetCurrent of GPU {device_id}")

    def copy_in(self, address: int, data: bytes) -> None:
        """Copy host bytes to the device."""
        self._check(
            self._cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))), "cuMemcpyHtoD"
        )

    def copy_out(self, address: int, length: int) -> bytes:
        """Copy device bytes to the host."""
        target = ctypes.create_string_buffer(length)
        status = self._cuda.cuMemcpyDtoH_v2(target, ctypes.c_uint64(address), ctypes.c_size_t(length))
        self._check(status, "cuMemcpyDtoH")
        return target.raw

    def free(self, address: int) -> None:
        """Give memory back."""
        self._check(self._cuda.cuMemFree_v2(ctypes.c_uint64(address)), "cuMemFree")

    def _check(self, status: int, what: str) -> None:
        if status != _SUCCESS:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(name))
            raise BackendUnavailableError(f"{what} failed: {(name.value or b'unknown').decode()} ({status})")


class GpuBuffer:
    """Memory of one GPU. Made by `CudaDriver.allocate`."""

    def __init__(self, driver: CudaDriver, region: MemoryRegion) -> None:
        self._driver = driver
        self._region = region
        self._closed = False

    @property
    def region(self) -> MemoryRegion:
        """Where it lies."""
        return self._region

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy host bytes in."""
        self._driver.enter(self._region.device_id)
        self._driver.copy_in(self._inside(offset, len(data)), data)

    def read(self, length: int, offset: int = 0) -> bytes:
        """Copy bytes out to the host."""
        self._driver.enter(self._region.device_id)
        return self._driver.copy_out(self._inside(offset, length), length)

    def close(self) -> None:
        """Free it."""
        if not self._closed:
            self._driver.enter(self._region.device_id)
            self._driver.free(self._region.address)
            self._closed = True

    def _inside(self, offset: int, length: int) -> int:
        if self._closed:
            raise ValueError("this buffer was closed")
        if offset < 0 or offset + length > self._region.length:
            raise ValueError(f"bytes {offset} to {offset + length} lie outside a buffer of {self._region.length}")
        return self._region.address + offset
