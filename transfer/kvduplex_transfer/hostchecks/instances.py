"""What each EC2 instance type is known to have, and whether KV can move between its accelerators and the network.

Sources: the EC2 user guide (``efa-acc-inst-types``) and the Neuron architecture guides for devices, memory, EFA
interfaces and bandwidth; NIXL's ``src/plugins/libfabric/README.md`` and ``libfabric_topology.cpp`` for which Neuron
types can register device memory and for PCI ids; the Neuron driver's platform table for ``trn3.48xlarge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

__all__ = ["INSTANCE_TYPES", "Accelerator", "InstanceType", "instance_type_named"]


class Accelerator(StrEnum):
    """Which kind of device an instance computes on."""

    NEURON = "neuron"
    GPU = "gpu"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One row of the table. ``None`` stands for what no source we trust states.

    Attributes:
        name: EC2 name, e.g. ``trn2.48xlarge``.
        accelerator: Kind of device.
        devices: Accelerator devices (chips or GPUs).
        cores_per_device: NeuronCores of a device as the hardware counts them, before logical grouping.
        memory_gib: Device memory of one device.
        efa_interfaces: Most EFA interfaces, one per network card.
        network_gbps: Aggregate network bandwidth.
        obstacle: Why EFA cannot reach accelerator memory here; empty when it can.
    """

    name: str
    accelerator: Accelerator
    devices: int | None
    cores_per_device: int | None
    memory_gib: int | None
    efa_interfaces: int | None
    network_gbps: int | None
    obstacle: str = ""

    @property
    def device_rdma(self) -> bool:
        """Whether EFA can reach accelerator memory on this type."""
        return not self.obstacle


_NO_EFA = "it has no EFA, so device memory cannot be reached over the network"
_HOST_EFA = "its one EFA belongs to the host and cannot be routed to a Neuron device"

_NEURON = Accelerator.NEURON
_GPU = Accelerator.GPU

_ROWS = (
    InstanceType("trn1.2xlarge", _NEURON, 1, 2, 32, 0, None, _NO_EFA),
    InstanceType("trn1.32xlarge", _NEURON, 16, 2, 32, 8, 800),
    InstanceType("trn1n.32xlarge", _NEURON, 16, 2, 32, 16, 1600),
    InstanceType("trn2.3xlarge", _NEURON, 1, 8, 96, 1, None, _HOST_EFA),
    InstanceType("trn2.48xlarge", _NEURON, 16, 8, 96, 16, 3200),
    InstanceType("trn2u.48xlarge", _NEURON, 16, 8, 96, 16, 3200),
    InstanceType("trn3.48xlarge", _NEURON, None, 8, 144, None, None),
    InstanceType("inf2.48xlarge", _NEURON, 12, 2, 32, 0, None, _NO_EFA),
    InstanceType("p5.48xlarge", _GPU, 8, None, 80, 32, 3200),
    InstanceType("p5e.48xlarge", _GPU, 8, None, 141, 32, 3200),
    InstanceType("p5en.48xlarge", _GPU, 8, None, 141, 16, 3200),
    InstanceType("c6in.32xlarge", Accelerator.NONE, 0, None, None, 2, 200),
)

INSTANCE_TYPES: Mapping[str, InstanceType] = MappingProxyType({row.name: row for row in _ROWS})
"""Known types by name."""


def instance_type_named(name: str) -> InstanceType | None:
    """The row of `name`, or None when the table does not know it."""
    return INSTANCE_TYPES.get(name)
