"""`HostBackend`: the transfer interface over host memory, on any Linux machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvduplex_transfer.engine import engine_plan
from kvduplex_transfer.host.options import HostOptions, usual_ports
from kvduplex_transfer.host.plan import engine_cores, engine_environment, engine_options
from kvduplex_transfer.host.probe import probe
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

__all__ = ["HostBackend"]


class HostBackend:
    """CPU engines on cores of their own, KV blocks in host memory, UCX between them.

    Args:
        cores: Cores that engines may use; those this process may run on when not given.
        interpreter: Python that has vLLM and NIXL installed.
        network_devices: Interfaces that agents opened here speak and listen on, as UCX names them: ``lo`` reaches
            this machine alone, ``eth0`` or ``all`` reach others. UCX over TCP has no authentication.
    """

    def __init__(
        self,
        *,
        cores: Sequence[int] | None = None,
        interpreter: str = sys.executable,
        network_devices: str = "lo",
    ) -> None:
        self._cores = tuple(sorted(os.sched_getaffinity(0) if cores is None else cores))
        self._interpreter = interpreter
        self._network_devices = network_devices

    @property
    def name(self) -> str:
        """``host``."""
        return "host"

    def probe(self, host: Host) -> HostReport:
        """Report what `host` has for CPU engines and what is wrong with it."""
        return probe(host, cores=len(self._cores), interpreter=self._interpreter, ports=usual_ports())

    def nixl_settings(self) -> NixlSettings:
        """UCX over TCP and shared memory, host memory."""
        return NixlSettings(
            backends={"UCX": {}},
            memory_type=MemoryType.DRAM,
            kv_buffer_device="cpu",
            environment={
                # Named so that UCX does not spend seconds probing devices that a CPU host lacks.
                "UCX_TLS": "tcp,self,sm",
                "UCX_NET_DEVICES": self._network_devices,
                # UCX would write its warnings to stdout, between a command's results.
                "UCX_LOG_FILE": "stderr",
            },
        )

    def verify_agent(self, agent: TransferAgent) -> None:
        """Refuse an agent without UCX, or whose UCX does not move host memory.

        Raises:
            SilentFallbackError: It is one.
        """
        refuse_fallback(agent, self.nixl_settings())

    def engine_plan(self, recipe: RecipeLike, role: Role, index: int = 0) -> EnginePlan:
        """Command and environment that start the `index`-th engine of `role`; see `HostOptions` for its settings.

        Raises:
            ConfigError: A setting is unknown or out of range, or there are fewer engines or cores than asked for.
        """
        where = f"recipe {recipe.name}, {role}"
        options = HostOptions.parse(recipe.options(role), where=where)
        settings = self.nixl_settings()
        engine = engine_options(options, model=recipe.model, role=role, index=index, settings=settings, where=where)
        cores = engine_cores(options, role=role, index=index, available=self._cores)
        return engine_plan(
            engine,
            name=f"{role}-{index}",
            environment=engine_environment(options, cores=cores, settings=settings),
            interpreter=self._interpreter,
        )

    def open(self, name: str) -> TransferAgent:
        """Open an agent over host memory.

        Raises:
            BackendUnavailableError: NIXL or its UCX plugin is missing.
            SilentFallbackError: `verify_agent` refused it.
        """
        return open_agent(self, name)
