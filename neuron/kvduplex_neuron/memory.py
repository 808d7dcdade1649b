"""Memory of NeuronCores through libnrt, for benchmarks and hardware tests; engines allocate through torch.

The functions are those of ``nrt/nrt.h`` of the Neuron runtime. No hardware has run this module yet.
"""

from __future__ import annotations

import ctypes
import os

from kvduplex_transfer.errors import BackendUnavailableError
from kvduplex_transfer.interface import MemoryRegion, MemoryType

__all__ = ["NeuronBuffer", "NeuronRuntime"]

_LIBRARY = "libnrt.so.1"
_NO_FRAMEWORK = 1  # NRT_FRAMEWORK_TYPE_NO_FW
_ON_DEVICE = 0  # NRT_TENSOR_PLACEMENT_DEVICE
_SUCCESS = 0
_MAP_HBM = "NEURON_RT_MAP_HBM"
_CHOICES_OF_CORES = frozenset({"NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"})


class NeuronRuntime:
    """The Neuron runtime of this process, initialised. It must be, before a NIXL agent is opened.

    It reserves one free NeuronCore, unless the environment names others: by itself the runtime would reserve all of
    them, and leave none to a second process (Neuron runtime configuration guide, "NeuronCore allocation").

    Args:
        library: Name or path of libnrt.

    Raises:
        BackendUnavailableError: libnrt cannot be loaded, or finds no free NeuronCore.
    """

    def __init__(self, library: str = _LIBRARY) -> None:
        os.environ.setdefault(_MAP_HBM, "1")  # without it a tensor has no address that could be registered
        if not _CHOICES_OF_CORES & os.environ.keys():
            os.environ["NEURON_RT_NUM_CORES"] = "1"
        try:
            self._nrt = ctypes.CDLL(library)
        except OSError as error:
            raise BackendUnavailableError(
                f"{library} cannot be loaded ({error}); put /opt/aws/neuron/lib on the loader path"
            ) from error
        self._declare()
        self._check(self._nrt.nrt_init(_NO_FRAMEWORK, b"", b""), "nrt_init")

    def allocate(self, length: int, device_id: int = 0) -> NeuronBuffer:
        """Allocate device memory.

        Args:
            length: Bytes.
            device_id: Logical NeuronCore, counted within those visible to this process.

        Raises:
            BackendUnavailableError: The core has too little memory, or its memory has no address.
        """
        tensor = ctypes.c_void_p()
        status = self._nrt.nrt_tensor_allocate(_ON_DEVICE, device_id, length, b"kvduplex", ctypes.byref(tensor))
        self._check(status, f"nrt_tensor_allocate of {length} bytes on NeuronCore {device_id}")
        address = self._nrt.nrt_tensor_get_va(tensor)
        if not address:
            self._nrt.nrt_tensor_free(ctypes.byref(tensor))
            raise BackendUnavailableError(
                f"memory of NeuronCore {device_id} has no address: set {_MAP_HBM}=1 before the runtime starts"
            )
        return NeuronBuffer(self, tensor, MemoryRegion(address, length, device_id, MemoryType.VRAM))

    def copy_in(self, tensor: ctypes.c_void_p, data: bytes, offset: int) -> None:
        """Copy host bytes to a tensor."""
        self._check(self._nrt.nrt_tensor_write(tensor, data, offset, len(data)), "nrt_tensor_write")

    def copy_out(self, tensor: ctypes.c_void_p, length: int, offset: int) -> bytes:
        """Copy bytes of a tensor to the host."""
        target = ctypes.create_string_buffer(length)
        self._check(self._nrt.nrt_tensor_read(tensor, target, offset, length), "nrt_tensor_read")
        return target.raw

    def free(self, tensor: ctypes.c_void_p) -> None:
        """Give a tensor back."""
        self._nrt.nrt_tensor_free(ctypes.byref(tensor))

    def close(self) -> None:
        """End the runtime of this process; every buffer must be closed and every agent ended."""
        self._nrt.nrt_close()

    def _declare(self) -> None:
        nrt, size, pointer = self._nrt, ctypes.c_size_t, ctypes.c_void_p
        nrt.nrt_init.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
        nrt.nrt_tensor_allocate.argtypes = [ctypes.c_int, ctypes.c_int, size, ctypes.c_char_p, ctypes.POINTER(pointer)]
        nrt.nrt_tensor_free.argtypes, nrt.nrt_tensor_free.restype = [ctypes.POINTER(pointer)], None
        nrt.nrt_tensor_get_va.argtypes, nrt.nrt_tensor_get_va.restype = [pointer], pointer
        nrt.nrt_tensor_write.argtypes = [pointer, ctypes.c_char_p, size, size]
        nrt.nrt_tensor_read.argtypes = [pointer, pointer, size, size]
        nrt.nrt_close.argtypes, nrt.nrt_close.restype = [], None

    def _check(self, status: int, what: str) -> None:
        if status != _SUCCESS:
            raise BackendUnavailableError(
                f"{what} answered NRT_STATUS {status}; `neuron-ls` shows whether another process holds the cores"
            )


class NeuronBuffer:
    """Device memory of one NeuronCore. Made by `NeuronRuntime.allocate`."""

    def __init__(self, runtime: NeuronRuntime, tensor: ctypes.c_void_p, region: MemoryRegion) -> None:
        self._runtime = runtime
        self._tensor: ctypes.c_void_p | None = tensor
        self._region = region

    @property
    def region(self) -> MemoryRegion:
        """Where it lies."""
        return self._region

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy host bytes in."""
        self._runtime.copy_in(self._open(), data, offset)

    def read(self, length: int, offset: int = 0) -> bytes:
        """Copy bytes out to the host."""
        return self._runtime.copy_out(self._open(), length, offset)

    def close(self) -> None:
        """Free it."""
        if self._tensor is not None:
            self._runtime.free(self._tensor)
            self._tensor = None

    def _open(self) -> ctypes.c_void_p:
        if self._tensor is None:
            raise ValueError("this buffer was closed")
        return self._tensor
