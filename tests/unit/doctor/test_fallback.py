"""Refusing silent fallbacks: what an agent says it runs on, and what its process really opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from kvduplex_gpu.backend import GpuBackend
from kvduplex_gpu.options import Transport
from kvduplex_neuron.backend import NeuronBackend
from kvduplex_transfer.errors import BackendUnavailableError, SilentFallbackError
from kvduplex_transfer.hostchecks.rails import open_rails, refuse_without_cuda, refuse_without_rails
from kvduplex_transfer.interface import AgentFacts, MemoryType, TransferAgent
from kvduplex_transfer.opening import open_agent

DRAM, VRAM = MemoryType.DRAM, MemoryType.VRAM


@dataclass
class SaidToRun:
    """An agent that reports given facts, as NIXL would on a host that is not here."""

    facts: AgentFacts
    name: str = "decode-0"


def running(**backends: tuple[MemoryType, ...]) -> TransferAgent:
    facts = AgentFacts(backends=backends, parameters={}, plugins=("LIBFABRIC", "UCX"))
    return cast("TransferAgent", SaidToRun(facts))


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """A ``/proc/PID`` with two RDMA devices open and UCX's CUDA transport mapped."""
    (tmp_path / "fd").mkdir()
    targets = [
        "/dev/infiniband/uverbs0",
        "/dev/infiniband/uverbs0",
        "/dev/infiniband/uverbs9",
        "/dev/null",
        "socket:[7]",
    ]
    for number, target in enumerate(targets):
        (tmp_path / "fd" / str(number)).symlink_to(target)
    maps = (
        "7f00-7f01 r-xp 00000000 fd:01 7   /srv/venv/nixl_cu12.libs/ucx/libuct_cuda-1f0a.so.0\n7f02-7f03 rw-p 0 0:0 0\n"
    )
    (tmp_path / "maps").write_text(maps)
    return tmp_path


@pytest.mark.parametrize("backend", [NeuronBackend(), GpuBackend()], ids=["neuron", "gpu"])
def test_a_plugin_that_did_not_start_is_refused(backend: Any) -> None:
    with pytest.raises(SilentFallbackError, match="LIBFABRIC did not start"):
        backend.verify_agent(running(UCX=(DRAM, VRAM)))


@pytest.mark.parametrize("backend", [NeuronBackend(), GpuBackend()], ids=["neuron", "gpu"])
def test_a_provider_that_cannot_reach_device_memory_is_refused(backend: Any) -> None:
    with pytest.raises(SilentFallbackError, match="not for VRAM"):
        backend.verify_agent(running(LIBFABRIC=(DRAM,)))


@pytest.mark.parametrize("backend", [NeuronBackend(), GpuBackend()], ids=["neuron", "gpu"])
def test_without_an_open_rdma_device_it_is_refused(backend: Any) -> None:
    if open_rails():
        pytest.skip("this process has RDMA devices open")
    with pytest.raises(SilentFallbackError, match="provider other than efa"):
        backend.verify_agent(running(LIBFABRIC=(DRAM, VRAM)))


def test_rails_are_counted_once_each(process: Path) -> None:
    assert open_rails(process) == 2
    refuse_without_rails("a", process=process)


def test_cuda_transport_is_recognised_under_a_mangled_name(process: Path) -> None:
    refuse_without_cuda("a", process=process)
    (process / "maps").write_text("7f00-7f01 r-xp 0 fd:01 7   /usr/lib/libuct.so.0\n")
    with pytest.raises(SilentFallbackError, match="libuct_cuda"):
        refuse_without_cuda("a", process=process)


def test_ucx_that_claims_gpu_memory_without_a_gpu_is_refused_for_real() -> None:
    pytest.importorskip("nixl")
    if Path("/dev/nvidia0").exists():
        pytest.skip("this host has a GPU")
    with pytest.raises(SilentFallbackError, match="cannot reach GPU memory"):
        open_agent(GpuBackend(transport=Transport.UCX), "refused-ucx")


def test_a_libfabric_plugin_that_cannot_be_loaded_is_refused_for_real() -> None:
    pytest.importorskip("nixl")
    if Path("/dev/infiniband").exists():
        pytest.skip("this host has RDMA devices")
    with pytest.raises(BackendUnavailableError, match="LIBFABRIC"):
        open_agent(NeuronBackend(), "refused-libfabric")


@pytest.mark.parametrize(("backend", "library"), [(NeuronBackend(), "libnrt"), (GpuBackend(), "libcuda")])
def test_opening_without_the_vendor_runtime_names_it(backend: Any, library: str) -> None:
    if Path("/dev/neuron0").exists() or Path("/dev/nvidia0").exists():
        pytest.skip("this host has accelerators")
    with pytest.raises(BackendUnavailableError, match=library):
        backend.open("none")
