"""What the hardware tests run on: the accelerator of this host, and a recipe for it.

They are for a host that has one, and fail where there is none: a skipped hardware test proves nothing. Two variables
choose otherwise than by what the host has: with ``KVDUPLEX_TEST_BACKEND=host`` they run over host memory, and
``KVDUPLEX_TEST_RECIPE`` names the recipe that is served; without it that test is skipped, as it needs weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from kvduplex.doctor import choose_backend, load_backend
from kvduplex_transfer.hostview import LocalHost
from kvduplex_transfer.interface import HostReport

_VISIBLE = {"neuron": "NEURON_RT_VISIBLE_CORES", "gpu": "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class Accelerator:
    """The backend under test and what its doctor found."""

    backend: str
    report: HostReport

    def devices(self) -> Sequence[Mapping[str, str]]:
        """For each device, the environment in which a process sees it alone."""
        if self.backend == "host":
            return ({},)
        return [{_VISIBLE[self.backend]: str(first)} for first in self._firsts()]

    def _firsts(self) -> range:
        if self.backend == "gpu":
            return range(int(self.report.facts["gpus"]))
        cores, devices = int(self.report.facts["logical_cores"]), int(self.report.facts["neuron_devices"])
        return range(0, cores, cores // devices)


@pytest.fixture(scope="session")
def accelerator() -> Accelerator:
    host = LocalHost()
    name = os.environ.get("KVDUPLEX_TEST_BACKEND") or choose_backend(host)
    if name == "host" and "KVDUPLEX_TEST_BACKEND" not in os.environ:
        pytest.fail(
            "no accelerator: neither /dev/neuron* nor /dev/nvidia*; `kvduplex doctor --backend neuron` says more"
        )
    return Accelerator(name, load_backend(name).probe(host))
