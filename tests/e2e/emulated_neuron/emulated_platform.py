"""A vLLM platform that calls itself Neuron and computes on the CPU.

What it says to the NIXL connector is what vLLM's Neuron plugin says (``vllm_neuron/platform.py`` of the 0.24 and 0.29
lines): its device type is ``neuron``, and the one buffer device it allows is ``cuda``, which means device memory there.
Only the memory type differs, as its blocks lie in host memory.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

torch.utils.rename_privateuse1_backend("neuron")  # as torch-neuronx does, so that torch.device("neuron") exists


class EmulatedNeuron(CpuPlatform):  # type: ignore[misc]
    """Device type ``neuron``, out of vLLM's tree."""

    _enum = PlatformEnum.OOT
    device_name = "neuron"
    device_type = "neuron"

    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]:
        return {cls.device_type: ("cuda",)}

    @classmethod
    def get_nixl_memory_type(cls) -> str:
        return "DRAM"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Leave the recipe's settings as they are; the CPU's own checks want device type ``cpu``."""
        vllm_config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"


def register() -> str:
    """What the entry point names."""
    return f"{__name__}.EmulatedNeuron"
