"""Neuron devices of a host: what the PCI bus, the driver and ``neuron-ls`` each say.

The driver moved nodes of its sysfs tree in 2.31 (Neuron sysfs user guide), so counts come from the PCI bus and
``/dev``, and details from ``neuron-ls -j``, whose fields may be missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvduplex_neuron.lines import Family, family_of_device
from kvduplex_transfer.hostchecks.findings import fail, ok, shorten, warn
from kvduplex_transfer.hostchecks.instances import InstanceType
from kvduplex_transfer.interface import Finding, Host

__all__ = ["NeuronDevice", "check_devices", "check_driver", "check_usage", "neuron_devices", "neuron_family"]

_PCI = "/sys/bus/pci/devices"
_AMAZON = "0x1d0f"
_MODULE_VERSION = "/sys/module/neuron/version"
_TOOLS = ("neuron-ls", "/opt/aws/neuron/bin/neuron-ls")
_INSTALL_DRIVER = (
    "`sudo apt-get install -y aws-neuronx-dkms && sudo modprobe neuron` (Neuron repository), or use a Neuron DLAMI"
)
_INSTALL_TOOLS = "`sudo apt-get install -y aws-neuronx-tools`; it lies in /opt/aws/neuron/bin"


@dataclass(frozen=True, slots=True)
class NeuronDevice:
    """One device as ``neuron-ls -j`` prints it.

    Attributes:
        index: Its number, as in ``/dev/neuronN``.
        cores: Logical NeuronCores.
        logical_config: Physical cores in a logical one (LNC); 1 when the tool does not say.
        memory: Device memory in bytes.
        processes: Commands that hold it.
    """

    index: int
    cores: int
    logical_config: int
    memory: int
    processes: tuple[str, ...]


def neuron_devices(host: Host) -> tuple[NeuronDevice, ...]:
    """Devices according to ``neuron-ls``; empty when it is missing or answers something else."""
    for tool in _TOOLS:
        rows = _rows(host.run([tool, "-j"]).stdout)
        if rows:
            return tuple(_device(row) for row in rows)
    return ()


def neuron_family(host: Host) -> Family | None:
    """Generation of the Neuron devices on the PCI bus."""
    for path in host.glob(f"{_PCI}/*"):
        if _text(host, f"{path}/vendor") == _AMAZON:
            family = family_of_device(_text(host, f"{path}/device"))
            if family is not None:
                return family
    return None


def check_driver(host: Host) -> list[Finding]:
    """Is the kernel module loaded?"""
    version = host.read_text(_MODULE_VERSION)
    expected = "the neuron kernel module"
    if version is not None:
        return [ok("neuron.driver", f"neuron {version.strip()}", expected)]
    why = "without it there is no device node and no peer memory for EFA"
    return [fail("neuron.driver", f"{_MODULE_VERSION} is absent", expected, why=why, fix=_INSTALL_DRIVER)]


def check_devices(host: Host, devices: tuple[NeuronDevice, ...], instance: InstanceType | None) -> list[Finding]:
    """Are all devices of this instance type there, for the bus, the driver and the tools?"""
    on_bus = len(_pci_addresses(host))
    nodes = host.glob("/dev/neuron[0-9]*")
    wanted = (instance.devices if instance else None) or on_bus
    expected = f"{wanted} devices on the PCI bus and as /dev/neuronN" if wanted else "at least one Neuron device"
    seen = f"{on_bus} on the PCI bus, {len(nodes)} device nodes, {len(devices)} in neuron-ls"
    if not on_bus and not nodes:
        why, fix = "there is no Neuron device here", "use a Trainium instance, e.g. trn2.48xlarge"
        return [fail("neuron.devices", seen, expected, why=why, fix=fix)]
    if len(nodes) < wanted or on_bus < wanted:
        return [fail("neuron.devices", seen, expected, why=_missing(nodes, on_bus), fix=_bring_back(nodes, on_bus))]
    if not devices:
        why = "neuron-ls does not answer, so cores, their grouping and who uses them stay unknown"
        return [warn("neuron.devices", seen, expected, why=why, fix=_INSTALL_TOOLS)]
    return [ok("neuron.devices", seen, expected), *_grouping(devices)]


def check_usage(devices: tuple[NeuronDevice, ...]) -> list[Finding]:
    """Does another process hold the cores?"""
    users = sorted({command for device in devices for command in device.processes})
    expected = "no process on the devices"
    if not devices:
        return []
    if not users:
        return [ok("neuron.usage", "free", expected)]
    return [
        warn(
            "neuron.usage",
            f"held by {shorten(users)}",
            expected,
            why="a NeuronCore belongs to one process; an engine that shares a range with another cannot start",
            fix="`neuron-ls` names the processes; stop them, or give the recipe another first_core",
        )
    ]


def _rows(text: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _device(row: dict[str, Any]) -> NeuronDevice:
    processes = row.get("neuron_processes") or []
    return NeuronDevice(
        index=int(row.get("neuron_device", 0)),
        cores=int(row.get("nc_count") or 0),
        logical_config=int(row.get("logical_neuroncore_config") or 1),
        memory=int(row.get("memory_size") or 0),
        processes=tuple(_program(process) for process in processes if isinstance(process, dict)),
    )


def _program(process: dict[str, Any]) -> str:
    # Arguments may hold keys or prompts; the program and its process id are enough to find it.
    program = str(process.get("command", "?")).split(" ", 1)[0]
    return f"{program} (pid {process.get('pid', '?')})"


def _pci_addresses(host: Host) -> list[str]:
    return [
        path
        for path in host.glob(f"{_PCI}/*")
        if _text(host, f"{path}/vendor") == _AMAZON and family_of_device(_text(host, f"{path}/device"))
    ]


def _text(host: Host, path: str) -> str:
    return (host.read_text(path) or "").strip()


def _missing(nodes: list[str], on_bus: int) -> str:
    if len(nodes) < on_bus:
        return "the driver did not bring up every device that the bus shows"
    return "the instance has fewer devices than its type should: it is degraded, or a container hides some"


def _bring_back(nodes: list[str], on_bus: int) -> str:
    if len(nodes) < on_bus:
        return "`dmesg | grep -i neuron`, then `sudo modprobe -r neuron && sudo modprobe neuron`; reboot if it persists"
    return "in a container pass every /dev/neuronN; on a host stop and start the instance to get other hardware"


def _grouping(devices: tuple[NeuronDevice, ...]) -> list[Finding]:
    configs = {device.logical_config for device in devices}
    seen = f"{sum(device.cores for device in devices)} logical cores, LNC {', '.join(map(str, sorted(configs)))}"
    if len(configs) == 1:
        return [ok("neuron.cores", seen, "the same LNC on every device")]
    why = "core ranges of a recipe would mean different things on different devices"
    fix = "set one NEURON_LOGICAL_NC_CONFIG for the host and restart what uses the devices"
    return [warn("neuron.cores", seen, "the same LNC on every device", why=why, fix=fix)]
