"""GPU memory through the CUDA driver's C interface, spoken to a library that implements it over host memory.

The shim has the prototypes of ``cuda.h``; what it cannot show is that a GPU behaves like it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from kvduplex_gpu.memory import CudaDriver
from kvduplex_transfer.errors import BackendUnavailableError
from kvduplex_transfer.interface import MemoryType

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

SHIM = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t CUdeviceptr;
static int started, current = -1, contexts[2], sync_memops;
int cuInit(unsigned flags) { started = !flags; return getenv("SHIM_NO_GPU") ? 100 : 0; }
int cuDeviceGet(int *device, int ordinal) {
    if (!started) return 3;
    *device = ordinal;
    return ordinal > 1 ? 101 : 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; return 0; }
int cuCtxSetCurrent(void *context) { current = (int *)context - contexts; return 0; }
int cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    if (current < 0) return 201;
    if (size > (1u << 20)) return 2;
    *address = (CUdeviceptr)calloc(1, size);
    return 0;
}
int cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address) {
    sync_memops += attribute == 6 && *(const int *)value == 1 && address;
    return 0;
}
int shim_sync_memops(void) { return sync_memops; }
int cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) { memcpy(to, (void *)from, size); return 0; }
int cuMemFree_v2(CUdeviceptr address) { free((void *)address); return 0; }
int cuGetErrorName(int error, const char **name) {
    *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == 100 ? "CUDA_ERROR_NO_DEVICE"
                         : "CUDA_ERROR_INVALID_DEVICE";
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cuda")
    source = folder / "cuda.c"
    source.write_text(SHIM)
    path = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


def test_bytes_come_back_and_the_region_says_where_they_lie(library: str) -> None:
    buffer = CudaDriver(library).allocate(4096, device_id=1)
    assert (buffer.region.length, buffer.region.device_id, buffer.region.memory_type) == (4096, 1, MemoryType.VRAM)
    buffer.write(b"kv" * 8, offset=16)
    assert buffer.read(16, offset=16) == b"kv" * 8
    assert ctypes.CDLL(library).shim_sync_memops() >= 1
    buffer.close()


def test_bytes_outside_the_buffer_are_refused(library: str) -> None:
    buffer = CudaDriver(library).allocate(64)
    with pytest.raises(ValueError, match="lie outside a buffer of 64"):
        buffer.write(b"x" * 65)
    with pytest.raises(ValueError, match="bytes -1 to 0"):
        buffer.read(1, offset=-1)
    buffer.close()


def test_closing_frees_once(library: str) -> None:
    buffer = CudaDriver(library).allocate(64)
    buffer.close()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.read(1)


def test_out_of_memory_is_named(library: str) -> None:
    with pytest.raises(BackendUnavailableError, match="2097152 bytes on GPU 0 failed: CUDA_ERROR_OUT_OF_MEMORY"):
        CudaDriver(library).allocate(2 << 20)


def test_a_gpu_that_is_not_there_is_named(library: str) -> None:
    with pytest.raises(BackendUnavailableError, match="GPU 7 failed: CUDA_ERROR_INVALID_DEVICE"):
        CudaDriver(library).allocate(64, device_id=7)


def test_no_gpu_is_said(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIM_NO_GPU", "1")
    with pytest.raises(BackendUnavailableError, match="cuInit failed: CUDA_ERROR_NO_DEVICE"):
        CudaDriver(library)


def test_a_missing_library_is_said(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="install the NVIDIA driver"):
        CudaDriver(str(tmp_path / "libcuda.so.1"))
