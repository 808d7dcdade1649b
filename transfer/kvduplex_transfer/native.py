"""The one door to NIXL: typed, with its errors mapped. Only the owner thread may call it.

``nixl`` is imported when an agent is started, never before.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvduplex_transfer.blocks import DescriptorArray
from kvduplex_transfer.errors import (
    BackendUnavailableError,
    InvalidDescriptorError,
    MetadataError,
    PeerLostError,
    TransferError,
    TransferFailedError,
)
from kvduplex_transfer.interface import AgentFacts, MemoryRegion, MemoryType, NixlSettings
from kvduplex_transfer.nixl_errors import nixl_call
from kvduplex_transfer.nixlwheel import import_nixl
from kvduplex_transfer.progress import resting_progress

__all__ = ["NativeAgent", "NativeRead"]

_NO_PLUGIN: Mapping[str, type[TransferError]] = {
    "nixlNotFoundError": BackendUnavailableError,
    "nixlInvalidParamError": BackendUnavailableError,
    "nixlBackendError": BackendUnavailableError,
    "RuntimeError": BackendUnavailableError,  # no plugin at all
}
_NO_PIN: Mapping[str, type[TransferError]] = {
    "nixlBackendError": InvalidDescriptorError,
    "nixlNotFoundError": InvalidDescriptorError,
    "nixlNotAllowedError": InvalidDescriptorError,
}
# Over UCX a peer is connected to while its metadata is loaded, so a backend error there is a peer out of reach.
_NO_PEER: Mapping[str, type[TransferError]] = {
    "nixlBackendError": PeerLostError,
    "nixlInvalidParamError": MetadataError,
    "nixlNotFoundError": MetadataError,
    "nixlUnknownError": MetadataError,
}


class NativeRead:
    """A posted read.

    NIXL's handle refers to the agent and so keeps it alive. It lives in here alone, and is let go by `release`: a
    traceback that somebody keeps holds this object at most.
    """

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class NativeAgent:
    """A NIXL agent, made by `start`.

    Args:
        name: Name in NIXL, unique among all agents that ever meet.
        settings: Backends, their parameters, threads.
    """

    def __init__(self, name: str, settings: NixlSettings) -> None:
        self._name = name
        self._settings = settings
        self._agent: Any = None

    def start(self) -> AgentFacts:
        """Import NIXL and create the agent; answers what runs, as NIXL says afterwards.

        Raises:
            BackendUnavailableError: NIXL is not installed, a plugin is missing, or it does not start.
        """
        api = _import_nixl()
        _keep_stdout_clean()
        config = api.nixl_agent_config(
            enable_prog_thread=self._settings.prog_thread, num_threads=self._settings.num_threads, backends=[]
        )
        rest = resting_progress(api.nixl_agent, self._settings.backends)
        with nixl_call(f"create NIXL agent {self._name!r}", _NO_PLUGIN), rest:
            self._agent = api.nixl_agent(self._name, config)
        for backend, parameters in self._settings.backends.items():
            self._start_backend(backend, parameters)
        return self._read_back()

    def register(self, memory_type: MemoryType, regions: Sequence[MemoryRegion]) -> None:
        """Pin regions of one memory type: all or none."""
        with nixl_call(f"register {len(regions)} regions of {memory_type}", _NO_PIN):
            self._agent.register_memory(_rows(regions), memory_type.value)

    def deregister(self, memory_type: MemoryType, regions: Sequence[MemoryRegion]) -> None:
        """Unpin."""
        with nixl_call(f"deregister {len(regions)} regions of {memory_type}"):
            self._agent.deregister_memory(self._agent.get_reg_descs(_rows(regions), memory_type.value))

    def metadata(self) -> bytes:
        """Connection and registration data."""
        with nixl_call("read the agent's metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer; returns the name it goes by in NIXL."""
        with nixl_call("load the peer's metadata", _NO_PEER):
            name = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Disconnect from a peer."""
        with nixl_call(f"remove peer {name!r}"):
            self._agent.remove_remote_agent(name)

    def start_read(
        self,
        peer: str,
        memory_types: tuple[MemoryType, MemoryType],
        remote: DescriptorArray,
        local: DescriptorArray,
        notify: bytes,
    ) -> tuple[NativeRead, bool]:
        """Post a read.

        Args:
            peer: Its name in NIXL.
            memory_types: Of the remote and of the local blocks.
            remote: Blocks to read.
            local: Where they go.
            notify: Message for the peer once all bytes were read; empty for none.

        Returns:
            The read, and whether it is already done.
        """
        with nixl_call(f"read {len(remote)} blocks from {peer!r}"):
            read = NativeRead(
                self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(local, memory_types[1].value),
                    self._agent.get_xfer_descs(remote, memory_types[0].value),
                    peer,
                    notify,
                )
            )
            try:
                return read, self._is_done(self._agent.transfer(read.handle))
            except BaseException:
                read.handle.release()
                read.handle = None
                raise

    def is_done(self, read: NativeRead) -> bool:
        """Whether a read is done; raises when it failed."""
        with nixl_call("read"):
            return self._is_done(self._agent.check_xfer_state(read.handle))

    def release(self, read: NativeRead) -> None:
        """Free a read that ended. Never call it before: NIXL answers "released" while UCX goes on writing."""
        with nixl_call("release a read"):
            self._agent.release_xfer_handle(read.handle)
        read.handle = None

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a message."""
        with nixl_call(f"notify {peer!r}"):
            self._agent.send_notif(peer, payload)

    def notifications(self) -> Mapping[str, Sequence[bytes]]:
        """Messages since the last call, by the sender's name in NIXL."""
        with nixl_call("fetch notifications"):
            messages: Mapping[str, Sequence[bytes]] = self._agent.get_new_notifs()
        return messages

    def destroy(self) -> None:
        """End the agent; once it returns nothing is written to memory any more.

        Raises:
            TransferFailedError: Something still refers to NIXL's agent, so that it goes on.
        """
        if self._agent is None:
            return
        native = weakref.ref(self._agent.agent)
        self._agent = None
        if native() is not None:
            gc.collect()
        if native() is not None:
            raise TransferFailedError(
                f"NIXL agent {self._name!r} is still referred to and goes on; do not free its memory in this process"
            )

    def _start_backend(self, backend: str, parameters: Mapping[str, str]) -> None:
        available = self._agent.get_plugin_list()
        if backend not in available:
            raise BackendUnavailableError(
                f"NIXL has no plugin {backend!r}, only {', '.join(sorted(available))}; "
                f"check that the libraries it links to are found, and NIXL_PLUGIN_DIR"
            )
        init = dict(parameters)
        if self._settings.num_threads > 0:
            init.setdefault("num_threads", str(self._settings.num_threads))
        hint = f"when a library of the plugin is missing, `ldd` of its libplugin_{backend}.so says which"
        with nixl_call(f"start NIXL backend {backend!r} with {init}", _NO_PLUGIN, hint=hint):
            self._agent.create_backend(backend, init)

    def _read_back(self) -> AgentFacts:
        backends = {
            name: tuple(kind for kind in MemoryType if f"{kind.value}_SEG" in self._agent.get_backend_mem_types(name))
            for name in self._agent.backends
        }
        parameters = {name: dict(self._agent.get_backend_params(name)) for name in self._agent.backends}
        return AgentFacts(
            backends=MappingProxyType(backends),
            parameters=MappingProxyType(parameters),
            plugins=tuple(sorted(self._agent.get_plugin_list())),
        )

    @staticmethod
    def _is_done(status: str) -> bool:
        if status == "ERR":
            raise TransferFailedError("NIXL reports ERR for the read")
        return status == "DONE"


def _rows(regions: Sequence[MemoryRegion]) -> list[tuple[int, int, int, str]]:
    return [(region.address, region.length, region.device_id, "") for region in regions]


def _import_nixl() -> Any:
    try:
        return import_nixl()
    except ImportError as error:
        raise BackendUnavailableError(
            f"NIXL cannot be imported ({error}); install the engine extra of this backend, e.g. "
            f"pip install 'kvduplex[engine-cpu]'"
        ) from error


def _keep_stdout_clean() -> None:
    # NIXL's Python layer announces every agent on stdout, where commands print results.
    logger = logging.getLogger("nixl")
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)
