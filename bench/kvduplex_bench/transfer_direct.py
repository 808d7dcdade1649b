"""NIXL itself, without the transfer interface over it: what the interface is measured against."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from kvduplex_bench.errors import BenchError
from kvduplex_transfer.blocks import DescriptorArray
from kvduplex_transfer.interface import MemoryRegion, MemoryType, NixlSettings
from kvduplex_transfer.progress import resting_progress

__all__ = ["DirectAgent"]


class DirectAgent:
    """One NIXL agent with one registered region, driven from the calling thread.

    Args:
        name: Unique agent name.
        settings: The same that the measured backend uses.
        region: Memory to register.

    Raises:
        BenchError: NIXL refuses the backend.
    """

    def __init__(self, name: str, settings: NixlSettings, region: MemoryRegion) -> None:
        api = import_module("nixl._api")
        config = api.nixl_agent_config(
            enable_prog_thread=settings.prog_thread, num_threads=settings.num_threads, backends=[]
        )
        # As the interface does it: a thread that spins would take the core that the other arm's peer needs.
        with resting_progress(api.nixl_agent, settings.backends):
            self._agent: Any = api.nixl_agent(name, config)
        for backend, parameters in settings.backends.items():
            self._agent.create_backend(backend, dict(parameters))
        self._memory = region.memory_type
        row = (region.address, region.length, region.device_id, "")
        self._registered = self._agent.register_memory([row], region.memory_type.value)

    def metadata(self) -> bytes:
        """Connection and registration data."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer; returns its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, peer: str, remote: DescriptorArray, local: DescriptorArray, *, timeout_s: float) -> None:
        """Read once and wait, asking NIXL until it is done, as fast as it answers.

        Raises:
            BenchError: The read failed, or was not done in time.
        """
        handle = self._agent.initialize_xfer("READ", self._descs(local), self._descs(remote), peer, b"")
        try:
            state, deadline = self._agent.transfer(handle), time.monotonic() + timeout_s
            while state == "PROC" and time.monotonic() < deadline:
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise BenchError(f"a direct read from {peer} ended as {state} within {timeout_s:g} s")

    def close(self) -> None:
        """Unregister and end the agent."""
        if self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None

    def _descs(self, rows: DescriptorArray) -> Any:
        return self._agent.get_xfer_descs(rows, MemoryType(self._memory).value)
