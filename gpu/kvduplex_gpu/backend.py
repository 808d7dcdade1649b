"""`GpuBackend`: the transfer interface over GPU memory, by libfabric over EFA or by UCX."""

from __future__ import annotations

import sys
from pathlib import Path

from kvduplex_gpu.options import OWN_SETTINGS, GpuOptions, Transport
from kvduplex_gpu.probe import probe
from kvduplex_transfer.interface import EnginePlan, Host, HostReport, MemoryType, NixlSettings, RecipeLike, Role
from kvduplex_transfer.recipes import Catalogue, accelerator_plan

__all__ = ["GpuBackend", "gpu_recipes"]

_RECIPES = (Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes")  # wheel, source tree


class GpuBackend:
    """Engines on NVIDIA GPUs, KV blocks in their memory.

    Args:
        interpreter: Python that has vLLM and NIXL installed.
        transport: How KV travels, for `probe`, `nixl_settings` and `open`; an engine's own is its recipe's.
    """

    def __init__(self, *, interpreter: str = sys.executable, transport: Transport = Transport.EFA) -> None:
        self._interpreter = interpreter
        self._transport = transport

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


def gpu_recipes() -> Catalogue:
    """The recipes this package ships."""
    return Catalogue("gpu", next((folder for folder in _RECIPES if folder.is_dir()), _RECIPES[-1]))


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
