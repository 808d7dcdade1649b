"""Elastic Fabric Adapter: are all interfaces there, can they reach accelerator memory, does libfabric see them?

Sources: the EFA kernel driver (amzn/amzn-drivers, ``kernel/linux/efa``: device ids, ``p2p`` attribute, port state);
libfabric's ``fi_info``; NIXL's libfabric plugin, which prefers cxi, then efa, then tcp, then sockets, and says nothing
when it ends up on tcp (``src/utils/libfabric/libfabric_common.cpp``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from kvduplex_transfer.hostchecks.findings import fail, ok, shorten, warn
from kvduplex_transfer.hostchecks.instances import InstanceType
from kvduplex_transfer.interface import Finding, Host

__all__ = ["EfaDevice", "check_efa", "efa_devices"]

_CLASS = "/sys/class/infiniband"
_AMAZON = "0x1d0f"
_EFA_IDS = re.compile(r"^0xefa[0-9a-f]$")
_MODULE_VERSION = "/sys/module/efa/version"
_INSTALLED = "/opt/amazon/efa_installed_packages"
_FI_INFO = ("fi_info", "/opt/amazon/efa/bin/fi_info")
_LAUNCH = (
    "relaunch with one EFA interface per network card (`aws ec2 run-instances --network-interfaces ...`: card 0 device "
    "0 `interface`, card 0 device 1 and device 0 of every other card `efa-only`); a running instance cannot get more"
)
_INSTALL = "install the EFA driver and libfabric: `sudo ./efa_installer.sh -y` from aws-efa-installer, then reboot"
_MISSING = 127  # how a `Host` says that a tool is not installed
_TCP = "NIXL would fall back to TCP without a word, and refuse device memory"
_OTHER_PEER = {"NEURON": "nvidia", "NVIDIA": "neuron"}


@dataclass(frozen=True, slots=True)
class EfaDevice:
    """One EFA interface as the kernel shows it.

    Attributes:
        name: RDMA device, e.g. ``rdmap79s0``.
        active: Whether its port is up.
        peer: Which peer memory the driver can register: ``NVIDIA...``, ``NEURON``, or empty for none. None when the
            driver has no such attribute.
    """

    name: str
    active: bool
    peer: str | None


def efa_devices(host: Host) -> tuple[EfaDevice, ...]:
    """EFA interfaces among the RDMA devices; adapters of other vendors are left out."""
    names = (PurePosixPath(path).name for path in host.glob(f"{_CLASS}/*"))
    return tuple(_device(host, name) for name in names if _is_efa(host, name))


def check_efa(host: Host, instance: InstanceType | None, *, peer: str | None) -> list[Finding]:
    """Everything about EFA that can be read.

    Args:
        host: Machine to read.
        instance: Its row of the table, when known.
        peer: Peer memory that must be reachable, ``NEURON`` or ``NVIDIA``; None for host memory alone.
    """
    devices = efa_devices(host)
    if not devices:
        return [_none(host, instance)]
    findings = [_count(devices, instance), _ports(devices), _driver(host), _nodes(host, devices)]
    if peer is not None:
        findings.append(_peer_memory(devices, peer))
    return [*findings, _provider(host, devices)]


def _is_efa(host: Host, name: str) -> bool:
    vendor, device = (_attribute(host, f"{name}/device/{key}") for key in ("vendor", "device"))
    return vendor == _AMAZON and bool(_EFA_IDS.match(device or ""))


def _device(host: Host, name: str) -> EfaDevice:
    state = _attribute(host, f"{name}/ports/1/state") or ""
    return EfaDevice(name, active="ACTIVE" in state, peer=_attribute(host, f"{name}/device/p2p"))


def _attribute(host: Host, path: str) -> str | None:
    text = host.read_text(f"{_CLASS}/{path}")
    return None if text is None else text.strip()


def _none(host: Host, instance: InstanceType | None) -> Finding:
    driver = host.read_text(_MODULE_VERSION)
    expected = f"{_expected_count(instance)} under {_CLASS}"
    if driver is None:
        why, fix = "without the EFA kernel module no interface shows up", f"{_INSTALL}; if none shows up, {_LAUNCH}"
    else:
        why, fix = "the driver is loaded, so the instance was launched without EFA interfaces", _LAUNCH
    seen = f"no EFA device, efa module {'absent' if driver is None else driver.strip()}"
    return fail("efa.devices", seen, expected, why=why, fix=fix)


def _count(devices: tuple[EfaDevice, ...], instance: InstanceType | None) -> Finding:
    seen, expected = f"{len(devices)} ({shorten(device.name for device in devices)})", _expected_count(instance)
    wanted = instance.efa_interfaces if instance else None
    if wanted is None or len(devices) >= wanted:
        return ok("efa.devices", seen, expected)
    return fail(
        "efa.devices",
        seen,
        expected,
        why="each accelerator transfers over the rails next to it; the missing ones cost their share of bandwidth, and "
        "a Neuron device without its own EFA cannot register memory",
        fix=_LAUNCH,
    )


def _expected_count(instance: InstanceType | None) -> str:
    if instance is None or instance.efa_interfaces is None:
        return "one EFA interface per network card"
    return f"{instance.efa_interfaces} EFA interfaces on {instance.name}"


def _ports(devices: tuple[EfaDevice, ...]) -> Finding:
    down = [device.name for device in devices if not device.active]
    if not down:
        return ok("efa.ports", f"{len(devices)} ports active", "every port active")
    return fail(
        "efa.ports",
        f"not active: {shorten(down)}",
        "every port active",
        why="a rail that is down fails or stalls every transfer striped over it",
        fix=f"`cat {_CLASS}/{down[0]}/ports/1/state`, then `dmesg | grep efa`; reboot the instance if it stays down",
    )


def _driver(host: Host) -> Finding:
    version = (host.read_text(_MODULE_VERSION) or "").strip()
    installer = (host.read_text(_INSTALLED) or "").partition("\n")[0].lstrip("# ")
    seen = f"efa module {version or 'of the kernel'}, {installer or 'EFA installer not found'}"
    expected = "the EFA installer's driver, 2.1 or newer (dma-buf since 1.16, device 0xefa2 since 2.1)"
    major = re.match(r"(\d+)\.(\d+)", version)
    if major is None or (int(major[1]), int(major[2])) >= (2, 1):
        return ok("efa.driver", seen, expected)
    return fail("efa.driver", seen, expected, why="device memory cannot be registered by dma-buf", fix=_INSTALL)


def _nodes(host: Host, devices: tuple[EfaDevice, ...]) -> Finding:
    nodes = host.glob("/dev/infiniband/uverbs*")
    seen, expected = f"{len(nodes)} of /dev/infiniband/uverbs*", f"{len(devices)}, one per EFA interface"
    if len(nodes) >= len(devices):
        return ok("efa.nodes", seen, expected)
    return fail(
        "efa.nodes",
        seen,
        expected,
        why=f"libfabric opens these nodes and sees no EFA without them: {_TCP}",
        fix="on a host: `sudo modprobe ib_uverbs`; in a container: pass /dev/infiniband/uverbs* as devices",
    )


def _peer_memory(devices: tuple[EfaDevice, ...], peer: str) -> Finding:
    expected = f"a peer memory provider in {_CLASS}/*/device/p2p"
    if all(device.peer is None for device in devices):
        return warn(
            "efa.p2p",
            "the efa module has no p2p attribute",
            expected,
            why="this driver does not tell whether device memory can be registered; dma-buf may still work",
            fix=_INSTALL,
        )
    without = [device.name for device in devices if not device.peer]
    if without:
        return fail(
            "efa.p2p",
            f"empty on {shorten(without)}",
            expected,
            why="the EFA driver found no driver whose memory it could register: registering KV blocks fails",
            fix=f"{_peer_fix(peer)}, then `sudo modprobe -r efa && sudo modprobe efa`",
        )
    seen = ", ".join(sorted({device.peer or "" for device in devices}))
    if _OTHER_PEER.get(peer, "\0") in seen.lower():
        why = "the EFA driver names the first peer it finds, and that is another accelerator's"
        return warn("efa.p2p", seen, f"{expected} for {peer}", why=why, fix=_peer_fix(peer))
    return ok("efa.p2p", seen, expected)


def _peer_fix(peer: str) -> str:
    return "`sudo modprobe neuron`" if peer == "NEURON" else "`sudo modprobe nvidia`, the open kernel module"


def _provider(host: Host, devices: tuple[EfaDevice, ...]) -> Finding:
    expected = f"provider efa with {len(devices)} domains (`fi_info -p efa -t FI_EP_RDM`)"
    answers = ((tool, host.run([tool, "-p", "efa", "-t", "FI_EP_RDM"])) for tool in _FI_INFO)
    tool, result = next(((tool, answer) for tool, answer in answers if answer.returncode != _MISSING), ("", None))
    if result is None:
        why = f"it cannot be seen whether libfabric finds EFA; if not, {_TCP}"
        return warn("efa.provider", "fi_info is not installed", expected, why=why, fix=_INSTALL)
    domains = set(re.findall(r"^\s*domain:\s*(\S+)$", result.stdout, re.MULTILINE))
    if "provider: efa" in result.stdout and domains:
        return ok("efa.provider", f"{len(domains)} domains", expected)
    answer = (result.stderr or result.stdout).strip()[:120]
    return fail(
        "efa.provider",
        f"{tool} answers {result.returncode}: {answer or 'nothing'}",
        expected,
        why=f"libfabric does not see EFA: {_TCP}",
        fix=f"unset FI_PROVIDER or set it to efa; let `ldd {tool}` show the EFA installer's libfabric; else {_INSTALL}",
    )
