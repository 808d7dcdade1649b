"""NVIDIA driver and devices of a host, read from ``/proc/driver/nvidia`` and ``nvidia-smi``.

Sources: the EFA kernel driver, which registers GPU memory by dma-buf or through the ``nvidia_p2p`` functions of the
open kernel module (amzn/amzn-drivers, ``kernel/linux/efa``); the CUDA compatibility guide for driver branches; the vLLM
post on bidirectional KV transfer (October 2026) for what its P5en hosts ran: driver 580, CUDA 13.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.hostchecks.instances import InstanceType
from kvduplex_transfer.interface import Finding, Host

__all__ = ["NvidiaDriver", "check_devices", "check_driver", "check_fabric_manager", "check_gdrcopy", "nvidia_driver"]

_VERSION = "/proc/driver/nvidia/version"
_OPEN = "Open Kernel Module"
_NVSWITCH = ("p5.", "p5e.", "p5en.")
_MINIMUM = {12: (525, "60.13"), 13: (580, "65.06")}
_UPGRADE = "`sudo apt-get install -y nvidia-open` of the wanted branch, or use an AMI with the open driver; then reboot"


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """The loaded kernel module.

    Attributes:
        version: E.g. ``580.126.16``.
        open_module: Whether it is the open one.
    """

    version: str
    open_module: bool

    @property
    def branch(self) -> int:
        """Leading number of the version."""
        return int(self.version.split(".")[0])


def nvidia_driver(host: Host) -> NvidiaDriver | None:
    """The loaded module, or None."""
    text = host.read_text(_VERSION) or ""
    match = re.search(r"Kernel Module.*?\s(\d{3}(?:\.\d+)+)", text)
    return NvidiaDriver(match[1], _OPEN in text) if match else None


def check_driver(host: Host, *, cuda: int | None, rdma: bool) -> list[Finding]:
    """Is the module loaded, open, and new enough for the CUDA that torch was built for?

    Args:
        host: Machine to read.
        cuda: Major CUDA version of the engine, when known.
        rdma: Whether EFA is to reach GPU memory.
    """
    driver = nvidia_driver(host)
    if driver is None:
        why, fix = "without it there is no GPU to run on", _UPGRADE
        return [fail("gpu.driver", f"no {_VERSION}", "the NVIDIA open kernel module", why=why, fix=fix)]
    kind = "open" if driver.open_module else "closed"
    findings = [_flavour(driver, kind)] if rdma else []
    return [*findings, _age(driver, cuda)]


def check_devices(host: Host, instance: InstanceType | None) -> list[Finding]:
    """Are all GPUs of this type there?"""
    listed = len(host.glob("/proc/driver/nvidia/gpus/*"))
    nodes = len(host.glob("/dev/nvidia[0-9]*"))
    wanted = (instance.devices if instance else None) or max(listed, 1)
    seen, expected = f"{listed} in the driver, {nodes} device nodes", f"{wanted} GPUs"
    if min(listed, nodes) >= wanted:
        return [ok("gpu.devices", seen, expected)]
    return [
        fail(
            "gpu.devices",
            seen,
            expected,
            why="engines that span all GPUs of the host cannot start",
            fix="`nvidia-smi` and `dmesg | grep -i nvrm` name a lost GPU; in a container run with --gpus all",
        )
    ]


def check_fabric_manager(host: Host, instance: InstanceType | None) -> list[Finding]:
    """NVSwitch systems need the fabric manager before CUDA can be initialised."""
    if instance is None or not instance.name.startswith(_NVSWITCH):
        return []
    result = host.run(["systemctl", "is-active", "nvidia-fabricmanager"])
    state = result.stdout.strip() or result.stderr.strip()[:80] or "unknown"
    expected = "active, on an instance with NVSwitch"
    if state == "active":
        return [ok("gpu.fabric_manager", state, expected)]
    return [
        fail(
            "gpu.fabric_manager",
            state,
            expected,
            why="CUDA fails with error 802 (system not yet initialized) on NVSwitch systems without it",
            fix="`sudo systemctl enable --now nvidia-fabricmanager`, of the driver's exact version",
        )
    ]


def check_gdrcopy(host: Host) -> list[Finding]:
    """The EFA provider copies small messages out of GPU memory with GDRCopy when it is there."""
    expected = "/dev/gdrdrv, the GDRCopy driver"
    if host.glob("/dev/gdrdrv"):
        return [ok("gpu.gdrcopy", "/dev/gdrdrv", expected)]
    why = "small transfers from GPU memory take a slower path; large KV blocks are not affected"
    return [warn("gpu.gdrcopy", "absent", expected, why=why, fix="`sudo apt-get install -y gdrdrv-dkms` (GDRCopy)")]


def _flavour(driver: NvidiaDriver, kind: str) -> Finding:
    seen, expected = f"{driver.version}, {kind} kernel module ({_VERSION})", "the open kernel module"
    if driver.open_module:
        return ok("gpu.module", seen, expected)
    return fail(
        "gpu.module",
        seen,
        expected,
        why="the closed module exports GPU memory neither by dma-buf nor to the EFA driver on current kernels, so KV "
        "blocks cannot be registered",
        fix=_UPGRADE,
    )


def _age(driver: NvidiaDriver, cuda: int | None) -> Finding:
    minimum = _MINIMUM.get(cuda or 0)
    if minimum is None:
        return ok("gpu.driver", driver.version, "a driver for the engine's CUDA")
    expected = f"{minimum[0]}.{minimum[1]} or newer for CUDA {cuda}"
    if driver.branch >= minimum[0]:
        return ok("gpu.driver", driver.version, expected)
    why = f"torch built for CUDA {cuda} finds no usable GPU under an older driver"
    return fail("gpu.driver", driver.version, expected, why=why, fix=_UPGRADE)
