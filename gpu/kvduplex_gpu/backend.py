"""`GpuBackend`: the transfer interface over GPU memory, by libfabric over EFA or by UCX."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from kvduplex_gpu.memory import CudaDriver, GpuBuffer
from kvduplex_gpu.options import OWN_SETTINGS, GpuOptions, Transport
from kvduplex_gpu.probe import probe
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.hostchecks.rails import refuse_without_cuda, refuse_without_rails
from kvduplex_transfer.interface import (
    EnginePlan,
    Host,
    HostReport,
    MemoryType,
    NixlSettings,
    RecipeLike,
    Role,
    TransferAgent,
)
from kvduplex_transfer.opening import open_agent, refuse_fallback
from kvduplex_transfer.recipes import Catalogue, accelerator_plan

__all__ = ["GpuBackend", "gpu_recipes"]

_TRANSPORT = "KVDUPLEX_GPU_TRANSPORT"
_RECIPES = (Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes")  # wheel, source tree


class GpuBackend:
    """Engines on NVIDIA GPUs, KV blocks in their memory.

    Args:
        interpreter: Python that has vLLM and NIXL installed.
        transport: How KV travels, for `probe`, `nixl_settings` and `open`; an engine's own is its recipe's. None for
            what ``KVDUPLEX_GPU_TRANSPORT`` says, or else EFA.

    Raises:
        ConfigError: ``KVDUPLEX_GPU_TRANSPORT`` names no transport.
    """

    def __init__(self, *, interpreter: str = sys.executable, transport: Transport | None = None) -> None:
        self._interpreter = interpreter
        self._transport = transport or _transport_of(os.environ)
        self._driver: CudaDriver | None = None

    @property
    def name(self) -> str:
        """``gpu``."""
        return "gpu"

    def probe(self, host: Host) -> HostReport:
        """Report what `host` has for GPU engines and what is wrong with it."""
        return probe(host, interpreter=self._interpreter, transport=self._transport, settings=self.nixl_settings())

    def nixl_settings(self) -> NixlSettings:
        """LIBFABRIC over EFA, or UCX; GPU memory either way."""
        return _settings(self._transport)

    def verify_agent(self, agent: TransferAgent) -> None:
        """Refuse an agent that does not reach GPU memory the way it was asked to.

        Raises:
            SilentFallbackError: The plugin did not start, came up without GPU memory, or on another provider.
        """
        refuse_fallback(agent, self.nixl_settings())
        if self._transport is Transport.EFA:
            refuse_without_rails(agent.name)
        else:
            refuse_without_cuda(agent.name)

    def engine_plan(self, recipe: RecipeLike, role: Role, index: int = 0) -> EnginePlan:
        """Command and environment that start the `index`-th engine of `role`; see `GpuOptions` for its settings.

        Raises:
            ConfigError: A setting is unknown or out of range, or there are fewer engines than asked for.
        """
        where = f"recipe {recipe.name}, {role}"
        options = GpuOptions.parse(recipe.options(role), where=where)
        return accelerator_plan(
            options,
            own=OWN_SETTINGS,
            model=recipe.model,
            role=role,
            index=index,
            settings=_settings(options.transport),
            environment=_visible(options, index),
            interpreter=self._interpreter,
            where=where,
        )

    def open(self, name: str) -> TransferAgent:
        """Open an agent over GPU memory; CUDA is initialised first, as NIXL's plugins look for its contexts.

        Raises:
            BackendUnavailableError: CUDA, NIXL or its plugin is missing.
            SilentFallbackError: `verify_agent` refused it.
        """
        self._started()
        return open_agent(self, name)

    def allocate(self, length: int, device_id: int = 0) -> GpuBuffer:
        """GPU memory for benchmarks and hardware tests; see `CudaDriver.allocate`.

        Raises:
            BackendUnavailableError: CUDA is missing, or the GPU has too little memory.
        """
        return self._started().allocate(length, device_id)

    def _started(self) -> CudaDriver:
        if self._driver is None:
            self._driver = CudaDriver()
        return self._driver


def gpu_recipes() -> Catalogue:
    """The recipes this package ships."""
    return Catalogue("gpu", next((folder for folder in _RECIPES if folder.is_dir()), _RECIPES[-1]))


def _transport_of(environ: Mapping[str, str]) -> Transport:
    named = environ.get(_TRANSPORT, Transport.EFA)
    if named not in set(Transport):
        raise ConfigError(f"{_TRANSPORT}={named}: unknown transport; set it to {' or '.join(Transport)}, or unset it")
    return Transport(named)


def _settings(transport: Transport) -> NixlSettings:
    if transport is Transport.EFA:
        # FI_PROVIDER makes libfabric fail where it would otherwise choose TCP without a word.
        backend, environment = "LIBFABRIC", {"FI_PROVIDER": "efa"}
    else:
        backend, environment = "UCX", {"UCX_TLS": "all", "UCX_NET_DEVICES": "all"}
    return NixlSettings(
        backends={backend: {}}, memory_type=MemoryType.VRAM, kv_buffer_device="cuda", environment=environment
    )


def _visible(options: GpuOptions, index: int) -> dict[str, str]:
    devices = options.devices(index)
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
