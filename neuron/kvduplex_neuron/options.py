"""Settings of a role on Neuron, as a recipe gives them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvduplex_transfer.recipes import AcceleratorOptions

__all__ = ["OWN_SETTINGS", "NeuronOptions"]

OWN_SETTINGS = frozenset(
    {
        "first_core",
        "compile_timeout_s",
        "execute_timeout_s",
        "shared_compile_cache",
        "compiled_only",
        "skip_warmup",
        "core_variable",
    }
)
"""Settings that become environment and that vLLM itself does not know."""


class NeuronOptions(AcceleratorOptions):
    """What `NeuronBackend.engine_plan` reads from ``recipe.options(role)``."""

    first_core: int = Field(default=0, ge=0)
    """First logical NeuronCore of this role on the host; its engines take consecutive ranges from there."""
    core_variable: Literal["NEURON_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES"] = "NEURON_VISIBLE_DEVICES"
    """Which variable takes the range; plugins since 0.21 set ``NEURON_RT_VISIBLE_CORES`` of each worker themselves."""
    compile_timeout_s: int = Field(default=1200, ge=60)
    """Longest compilation of the graphs of one engine."""
    execute_timeout_s: int = Field(default=1200, ge=60)
    """Longest single step; the first one loads compiled graphs."""
    shared_compile_cache: str | None = Field(default=None, min_length=1)
    """Folder on NFS or FSx that holds graphs compiled elsewhere (``NEURON_LIBTORCH_REMOTE_CACHE``)."""
    compiled_only: bool = False
    """Refuse to start rather than compile (``VLLM_NEURON_DISABLE_WARMUP_COMPILE``)."""
    skip_warmup: Literal["prefill", "decode"] | None = None
    """Graphs this engine never runs. A decode engine that may prefill a short suffix itself must not skip any."""

    def cores(self, index: int) -> tuple[int, int]:
        """First and last logical NeuronCore of the `index`-th engine."""
        first = self.first_core + index * self.ranks
        return first, first + self.ranks - 1
