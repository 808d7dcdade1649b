"""Settings of a role on NVIDIA GPUs, as a recipe gives them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from kvduplex_transfer.recipes import AcceleratorOptions

__all__ = ["OWN_SETTINGS", "GpuOptions", "Transport"]

OWN_SETTINGS = frozenset({"first_device", "transport"})
"""Settings that vLLM itself does not know."""


class Transport(StrEnum):
    """How KV travels between GPU engines."""

    EFA = "efa"
    """NIXL's LIBFABRIC plugin over Elastic Fabric Adapter: GPUDirect RDMA in EC2."""
    UCX = "ucx"
    """NIXL's UCX plugin: NVLink and shared memory on one host, InfiniBand or RoCE between hosts."""


class GpuOptions(AcceleratorOptions):
    """What `GpuBackend.engine_plan` reads from ``recipe.options(role)``."""

    transport: Transport = Transport.EFA
    first_device: int | None = Field(default=None, ge=0)
    """First GPU of this role on the host, its engines taking consecutive ones; every GPU is visible when not given."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of each GPU's memory that one engine may use."""

    def devices(self, index: int) -> tuple[int, ...] | None:
        """GPUs of the `index`-th engine, or None for all."""
        if self.first_device is None:
            return None
        first = self.first_device + index * self.ranks
        return tuple(range(first, first + self.ranks))
