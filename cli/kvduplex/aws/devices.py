"""Accelerators and EFA devices of this machine, and EFA's own counters, as the kernel shows them."""

from __future__ import annotations

from kvduplex.aws.metrics import Kind, Metric, Reading, Source
from kvduplex_transfer.interface import Host

__all__ = ["count_devices", "efa_readings"]

_DEVICES = ("/dev/neuron[0-9]*", "/dev/nvidia[0-9]*", "/sys/class/infiniband/*")
_COUNTERS = (
    (Source(Metric.EFA_READ_BYTES, "rdma_read_bytes", Kind.INCREASE, "Bytes"), "rdma_read_bytes"),
    (Source(Metric.EFA_DROPS, "rx_drops", Kind.INCREASE, "Count"), "rx_drops"),
)


def count_devices(host: Host) -> int:
    """How many accelerators and EFA devices there are."""
    return sum(len(host.glob(pattern)) for pattern in _DEVICES)


def efa_readings(host: Host) -> dict[Metric, Reading]:
    """EFA's hardware counters summed over devices; empty without EFA (EFA driver, ``hw_counters``)."""
    found: dict[Metric, Reading] = {}
    for source, name in _COUNTERS:
        texts = [host.read_text(path) for path in host.glob(f"/sys/class/infiniband/*/ports/1/hw_counters/{name}")]
        values = [float(text) for text in texts if text is not None and text.strip().isdigit()]
        if values:
            found[source.metric] = Reading(source, value=sum(values))
    return found
