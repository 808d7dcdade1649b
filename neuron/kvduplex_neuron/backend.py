"""`NeuronBackend`: the transfer interface over memory of NeuronCores, by libfabric over EFA."""

from __future__ import annotations

import sys
from pathlib import Path

from kvduplex_neuron.memory import NeuronBuffer, NeuronRuntime
from kvduplex_neuron.options import OWN_SETTINGS, NeuronOptions
from kvduplex_neuron.probe import probe
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.hostchecks.rails import refuse_without_rails
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

__all__ = ["NeuronBackend", "neuron_recipes"]

_RECIPES = (Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes")  # wheel, source tree


class NeuronBackend:
    """Engines on NeuronCores, KV blocks in device memory, NIXL's LIBFABRIC plugin between them.

    Args:
        interpreter: Python that has vLLM, its Neuron plugin and NIXL installed.
    """

    def __init__(self, *, interpreter: str = sys.executable) -> None:
        self._interpreter = interpreter
        self._runtime: NeuronRuntime | None = None

    @property
    def name(self) -> str:
        """``neuron``."""
        return "neuron"

    def probe(self, host: Host) -> HostReport:
        """Report what `host` has for Neuron engines and what is wrong with it."""
        return probe(host, interpreter=self._interpreter, settings=self.nixl_settings())

    def nixl_settings(self) -> NixlSettings:
        """LIBFABRIC over EFA, device memory.

        vLLM names the buffer device ``cuda``; on Neuron that means device memory of the NeuronCores (vLLM Neuron
        disaggregated inference tutorial).
        """
        return NixlSettings(
            backends={"LIBFABRIC": {}},
            memory_type=MemoryType.VRAM,
            kv_buffer_device="cuda",
            environment={
                # Makes libfabric fail where it would otherwise choose TCP without a word.
                "FI_PROVIDER": "efa",
                # Engines on one host would copy device memory through host shared memory, and get it wrong.
                "FI_EFA_ENABLE_SHM_TRANSFER": "0",
                # Without it a tensor has no address that could be registered; read before the first allocation.
                "NEURON_RT_MAP_HBM": "1",
            },
        )

    def verify_agent(self, agent: TransferAgent) -> None:
        """Refuse an agent that does not reach device memory over EFA.

        Raises:
            SilentFallbackError: LIBFABRIC did not start, came up without device memory, or on another provider.
        """
        refuse_fallback(agent, self.nixl_settings())
        refuse_without_rails(agent.name)

    def engine_plan(self, recipe: RecipeLike, role: Role, index: int = 0) -> EnginePlan:
        """Command and environment that start the `index`-th engine of `role`; see `NeuronOptions` for its settings.

        Raises:
            ConfigError: A setting is unknown or out of range, or there are fewer engines than asked for.
        """
        where = f"recipe {recipe.name}, {role}"
        options = NeuronOptions.parse(recipe.options(role), where=where)
        return accelerator_plan(
            options,
            own=OWN_SETTINGS,
            model=recipe.model,
            role=role,
            index=index,
            settings=self.nixl_settings(),
            environment=_environment(options, index),
            interpreter=self._interpreter,
            where=where,
        )

    def open(self, name: str) -> TransferAgent:
        """Open an agent over device memory; the runtime is started first, as NIXL needs it.

        Raises:
            BackendUnavailableError: The runtime, NIXL or its LIBFABRIC plugin is missing.
            SilentFallbackError: `verify_agent` refused it.
        """
        self._started()
        return open_agent(self, name)

    def allocate(self, length: int, device_id: int = 0) -> NeuronBuffer:
        """Device memory for benchmarks and hardware tests; see `NeuronRuntime.allocate`.

        Raises:
            BackendUnavailableError: The runtime is missing, or the core has too little memory.
        """
        return self._started().allocate(length, device_id)

    def _started(self) -> NeuronRuntime:
        if self._runtime is None:
            self._runtime = NeuronRuntime()
        return self._runtime


def neuron_recipes() -> Catalogue:
    """The recipes this package ships."""
    return Catalogue("neuron", next((folder for folder in _RECIPES if folder.is_dir()), _RECIPES[-1]))


def _environment(options: NeuronOptions, index: int) -> dict[str, str]:
    first, last = options.cores(index)
    environment = {
        options.core_variable: str(first) if first == last else f"{first}-{last}",
        "VLLM_NEURON_COMPILATION_TIMEOUT": str(options.compile_timeout_s),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(options.execute_timeout_s),
    }
    if options.bidirectional and options.connector is not ConnectorKind.NONE:
        environment["VLLM_NEURON_BIDIRECTIONAL_KV"] = "1"
    if options.shared_compile_cache is not None:
        environment["NEURON_LIBTORCH_REMOTE_CACHE"] = options.shared_compile_cache
    if options.compiled_only:
        environment["VLLM_NEURON_DISABLE_WARMUP_COMPILE"] = "1"
    if options.skip_warmup is not None:
        environment[f"VLLM_NEURON_SKIP_{options.skip_warmup.upper()}_WARMUP"] = "1"
    return environment
