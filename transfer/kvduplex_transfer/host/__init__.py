"""The host backend: engines on CPU cores, KV in host memory, transfers by UCX."""

from kvduplex_transfer.host.backend import HostBackend
from kvduplex_transfer.host.options import HostOptions

__all__ = ["HostBackend", "HostOptions"]
