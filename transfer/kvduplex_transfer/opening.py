"""Opening an agent of a backend, and refusing one that came up on less than was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvduplex_transfer.agent import NixlAgent
from kvduplex_transfer.errors import SilentFallbackError
from kvduplex_transfer.interface import MemoryType, NixlSettings, TransferAgent, TransferBackend

__all__ = ["open_agent", "open_over_host_memory", "refuse_fallback"]


def open_agent(backend: TransferBackend, name: str) -> NixlAgent:
    """Open an agent as `backend` wants it, verified; closed again when it is refused.

    Raises:
        BackendUnavailableError: NIXL or its plugin is missing.
        SilentFallbackError: ``backend.verify_agent`` refused it.
    """
    agent = NixlAgent(name, backend.nixl_settings())
    try:
        backend.verify_agent(agent)
    except BaseException:
        agent.close()
        raise
    return agent


def open_over_host_memory(backend: TransferBackend, name: str) -> NixlAgent:
    """Open an agent with `backend`'s settings, but over host memory: to try its wiring where its devices are not.

    Raises:
        BackendUnavailableError: NIXL or its plugin is missing.
        SilentFallbackError: The plugin does not move host memory.
    """
    settings = replace(backend.nixl_settings(), memory_type=MemoryType.DRAM, kv_buffer_device="cpu")
    agent = NixlAgent(name, settings)
    try:
        refuse_fallback(agent, settings)
    except BaseException:
        agent.close()
        raise
    return agent


def refuse_fallback(agent: TransferAgent, settings: NixlSettings) -> None:
    """Compare what runs with what was asked for: the part of ``verify_agent`` that every backend shares.

    Raises:
        SilentFallbackError: A backend is missing, or none of them moves the memory type asked for.
    """
    running = agent.facts.backends
    missing = [name for name in settings.backends if name not in running]
    if missing:
        raise SilentFallbackError(
            f"agent {agent.name!r} runs {_listed(running)} instead of {_listed(settings.backends)}: "
            f"{', '.join(missing)} did not start; plugins found: {_listed(agent.facts.plugins)}"
        )
    for name in settings.backends:
        if settings.memory_type not in running[name]:
            raise SilentFallbackError(
                f"agent {agent.name!r}: {name} came up for {_listed(running[name])} memory, not for "
                f"{settings.memory_type}; it fell back to a provider that cannot reach it"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
