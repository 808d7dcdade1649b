"""Which machine this is: EC2 instance type and kernel, and whether that type fits the backend."""

from __future__ import annotations

import re

from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.hostchecks.instances import Accelerator, InstanceType, instance_type_named
from kvduplex_transfer.interface import Finding, Host

__all__ = ["check_instance", "instance_type_of", "kernel_version"]

_PRODUCT = "/sys/devices/virtual/dmi/id/product_name"
_VENDOR = "/sys/devices/virtual/dmi/id/sys_vendor"
_RELEASE = "/proc/sys/kernel/osrelease"


def instance_type_of(host: Host) -> str | None:
    """EC2 instance type as the firmware tables name it, or None off EC2.

    Nitro instances carry their type as DMI product name, readable without root.
    """
    if "amazon" not in (host.read_text(_VENDOR) or "").lower():
        return None
    product = (host.read_text(_PRODUCT) or "").strip()
    return product or None


def kernel_version(host: Host) -> tuple[int, int] | None:
    """Major and minor version of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", host.read_text(_RELEASE) or "")
    return (int(match[1]), int(match[2])) if match else None


def check_instance(host: Host, wanted: Accelerator) -> list[Finding]:
    """Compare the instance type with the table and with what the backend needs."""
    name = instance_type_of(host)
    expected = f"an EC2 type with {wanted.value} devices that EFA can reach"
    if name is None:
        return [
            warn(
                "instance.type",
                f"not an EC2 instance ({_VENDOR})",
                expected,
                why="counts of devices and EFA interfaces cannot be compared with a table",
                fix="nothing, when this host is not in EC2; read the device findings instead",
            )
        ]
    return [_judge(name, instance_type_named(name), wanted, expected)]


def _judge(name: str, row: InstanceType | None, wanted: Accelerator, expected: str) -> Finding:
    if row is None:
        return warn(
            "instance.type",
            f"{name}, which the table of known types lacks",
            expected,
            why="counts of devices and EFA interfaces cannot be compared with a table",
            fix="compare the device findings with the type's page in the EC2 documentation",
        )
    if row.accelerator is not wanted:
        return fail(
            "instance.type",
            f"{name}, a type with {_described(row)}",
            expected,
            why=f"the {wanted.value} backend has nothing to run on here",
            fix=_alternative(row),
        )
    if not row.device_rdma:
        return fail(
            "instance.type",
            f"{name}: {row.obstacle}",
            expected,
            why="prefill and decode could not exchange KV from device memory",
            fix="use trn2.48xlarge, trn1.32xlarge or trn1n.32xlarge, launched with every EFA interface"
            if wanted is Accelerator.NEURON
            else "use p5en.48xlarge, p5e.48xlarge or p5.48xlarge, launched with every EFA interface",
        )
    return ok("instance.type", f"{name}, {_described(row)}", expected)


def _described(row: InstanceType) -> str:
    if row.accelerator is Accelerator.NONE:
        return "no accelerators"
    count = "" if row.devices is None else f"{row.devices} "
    return f"{count}{row.accelerator.value} devices of {row.memory_gib} GiB"


def _alternative(row: InstanceType) -> str:
    if row.accelerator is Accelerator.NONE:
        return "run `kvduplex serve cpu` here, or move to an accelerated instance type"
    return f"use the {row.accelerator.value} backend: `kvduplex serve {row.accelerator.value}`"
