"""`HostBackend`: the transfer interface over host memory, on any Linux machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvduplex_transfer.engine import engine_plan
from kvduplex_transfer.host.options import HostOptions
from kvduplex_transfer.host.plan import engine_cores, engine_environment, engine_options
from kvduplex_transfer.interface import EnginePlan, MemoryType, NixlSettings, RecipeLike, Role

__all__ = ["HostBackend"]


class HostBackend:
    """CPU engines on cores of their own, KV blocks in host memory, UCX between them.

    Args:
        cores: Cores that engines may use; those this process may run on when not given.
        interpreter: Python that has vLLM and NIXL installed.
    """

    def __init__(self, *, cores: Sequence[int] | None = None, interpreter: str = sys.executable) -> None:
        self._cores = tuple(sorted(os.sched_getaffinity(0) if cores is None else cores))
        self._interpreter = interpreter

    @property
    def name(self) -> str:
        """``host``."""
        return "host"

    def nixl_settings(self) -> NixlSettings:
        """UCX over TCP and shared memory, host memory."""
        return NixlSettings(
            backends={"UCX": {}},
            memory_type=MemoryType.DRAM,
            kv_buffer_device="cpu",
            # Named so that UCX does not spend seconds probing devices that a CPU host lacks.
            environment={"UCX_TLS": "tcp,self,sm"},
        )

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
