"""`NixlAgent`: the `TransferAgent` over NIXL that every backend opens."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np

from kvduplex_transfer.blocks import DescriptorArray, descriptors
from kvduplex_transfer.core import AgentCore
from kvduplex_transfer.errors import (
    AgentClosedError,
    BackendUnavailableError,
    ConfigError,
    InvalidDescriptorError,
    TransferError,
    TransferFailedError,
    TransferTimeoutError,
)
from kvduplex_transfer.hostmemory import check_mapped
from kvduplex_transfer.interface import (
    AgentFacts,
    BlockRef,
    MemoryRegion,
    MemoryType,
    NixlSettings,
    Notification,
    Peer,
    Region,
    TransferHandle,
    TransferState,
)
from kvduplex_transfer.metadata import MAX_NAME_LENGTH
from kvduplex_transfer.owner import OwnerThread
from kvduplex_transfer.reads import Read, ReadHandle

__all__ = ["NixlAgent"]

_Result = TypeVar("_Result")
_START_TIMEOUT_S = 60.0  # the first agent loads every plugin; on a host with many network cards that takes seconds


@dataclass(frozen=True, slots=True)
class _OwnedRegion(Region):
    """A region that knows its agent, so that another agent's is refused instead of mistaken."""

    incarnation: str = field(repr=False, compare=False)


class NixlAgent:
    """A NIXL agent behind one owner thread; see `TransferAgent` for the contract.

    Opening it sets the variables of ``settings.environment`` that the process does not have yet, before NIXL is
    imported: UCX and libfabric read them when they are loaded.

    Args:
        name: 1 to 200 printable characters without ``@``; unique among the agents that meet.
        settings: How NIXL is to run.
        timeout_s: Deadline of every call, in seconds.
        clock: Monotonic seconds.

    Raises:
        ConfigError: The name is not usable.
        BackendUnavailableError: NIXL or one of its plugins is missing, or does not start.
        TransferTimeoutError: NIXL did not start within a minute.
    """

    def __init__(
        self,
        name: str,
        settings: NixlSettings,
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = _checked_name(name)
        self._incarnation = uuid.uuid4().hex
        self._closed = False
        for key, value in settings.environment.items():
            os.environ.setdefault(key, value)
        self._core = AgentCore(name=name, incarnation=self._incarnation, settings=settings, clock=clock)
        self._owner = OwnerThread(f"transfer agent {name}", tick=self._core.tick, timeout_s=timeout_s)
        self._finalizer = weakref.finalize(self, _end_quietly, self._owner, self._core)
        try:
            self._facts = self._owner.call(self._core.start, what="starting NIXL", timeout_s=_START_TIMEOUT_S)
        except BaseException:
            self._finalizer()
            raise

    @property
    def name(self) -> str:
        """Unique agent name, as peers see it."""
        return self._name

    @property
    def facts(self) -> AgentFacts:
        """What this agent really runs on."""
        return self._facts

    def register(self, regions: Sequence[MemoryRegion]) -> tuple[Region, ...]:
        """Pin memory for transfers; see `TransferAgent.register`."""
        wanted = tuple(regions)
        for memory_type in {region.memory_type for region in wanted}:
            self._check_supported(memory_type)
        check_mapped(region for region in wanted if region.memory_type is MemoryType.DRAM and region.length > 0)
        ids = self._call(lambda: self._core.register(wanted), "register", discard=self._core.deregister)
        return tuple(_OwnedRegion(key, region, self._incarnation) for key, region in zip(ids, wanted, strict=True))

    def deregister(self, regions: Sequence[Region]) -> None:
        """Unpin; see `TransferAgent.deregister`."""
        for region in regions:
            if not isinstance(region, _OwnedRegion) or region.incarnation != self._incarnation:
                raise InvalidDescriptorError(f"region {region.id} was not registered with agent {self._name!r}")
        ids = [region.id for region in regions]
        self._call(lambda: self._core.deregister(ids), "deregister")

    def metadata(self) -> bytes:
        """This agent's connection and registration data; see `TransferAgent.metadata`."""
        return self._call(self._core.metadata, "metadata")

    def add_peer(self, metadata: bytes) -> Peer:
        """Load a peer's metadata; see `TransferAgent.add_peer`."""
        return Peer(self._call(lambda: self._core.add_peer(metadata), "add_peer"))

    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer; see `TransferAgent.remove_peer`."""
        self._call(lambda: self._core.remove_peer(peer.name), "remove_peer")

    def read(
        self, peer: Peer, remote: Sequence[BlockRef], local: Sequence[BlockRef], *, notify: bytes | None = None
    ) -> TransferHandle:
        """Start an asynchronous one-sided read; see `TransferAgent.read`.

        Long lists are cheapest as `kvduplex_transfer.blocks.BlockArray`.
        """
        payload = b"" if notify is None else _checked_payload(notify)
        there, here = _paired(remote, local)
        read = self._call(
            lambda: self._core.read(peer.name, there, here, payload),
            "read",
            discard=lambda late: late.settle(TransferFailedError("the read began after its caller's deadline")),
        )
        return ReadHandle(read.id, peer, int(here[:, 1].sum()), read, self._incarnation)

    def poll(self, handle: TransferHandle) -> TransferState:
        """State of a read; see `TransferAgent.poll`. At most a millisecond old."""
        return self._read_of(handle).state

    def wait(self, handle: TransferHandle, timeout_s: float) -> None:
        """Block until the read is done; see `TransferAgent.wait`."""
        read = self._read_of(handle)
        if not read.wait(timeout_s):
            raise TransferTimeoutError(f"read {read.id} from {read.peer.name!r} is pending after {timeout_s:g} s")
        if read.state is TransferState.FAILED:
            raise TransferFailedError(f"read {read.id} from {read.peer.name!r} failed: {read.error}") from read.error

    def release(self, handle: TransferHandle) -> None:
        """Give a handle back; see `TransferAgent.release`. Never waits."""
        read = self._read_of(handle)
        read.settle(TransferFailedError(f"read {read.id} was released while pending"))

    def notify(self, peer: Peer, payload: bytes) -> None:
        """Send a message to a peer; see `TransferAgent.notify`."""
        message = _checked_payload(payload)
        self._call(lambda: self._core.notify(peer.name, message), "notify")

    def notifications(self) -> tuple[Notification, ...]:
        """Messages that arrived since the last call."""
        return self._call(self._core.notifications, "notifications")

    def close(self) -> None:
        """End the agent; see `TransferAgent.close`."""
        self._closed = True
        self._owner.stop(self._core.shut)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        """The agent itself; leaving the block closes it."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the agent."""
        self.close()

    def __repr__(self) -> str:
        return f"NixlAgent({self._name!r}{', closed' if self._closed else ''})"

    def _call(
        self, function: Callable[[], _Result], what: str, discard: Callable[[_Result], None] | None = None
    ) -> _Result:
        return self._owner.call(function, what=what, discard=discard)

    def _read_of(self, handle: TransferHandle) -> Read:
        if self._closed:
            raise AgentClosedError(f"agent {self._name!r} is closed; open a new one")
        if not isinstance(handle, ReadHandle) or handle.incarnation != self._incarnation:
            raise InvalidDescriptorError(f"handle {handle.id} is not of agent {self._name!r}")
        return handle.read

    def _check_supported(self, memory_type: MemoryType) -> None:
        if not any(memory_type in kinds for kinds in self._facts.backends.values()):
            raise BackendUnavailableError(
                f"no backend of agent {self._name!r} moves {memory_type} memory; it runs {dict(self._facts.backends)}"
            )


def _end_quietly(owner: OwnerThread, core: AgentCore) -> None:
    """End of an agent that nobody closed: garbage collected, or the interpreter exits."""
    with contextlib.suppress(TransferError):
        owner.stop(core.shut)


def _checked_name(name: str) -> str:
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable() or "@" in name:
        raise ConfigError(f"agent name {name!r:.80} must be 1 to {MAX_NAME_LENGTH} printable characters without '@'")
    return name


def _checked_payload(payload: bytes) -> bytes:
    if not payload:
        raise InvalidDescriptorError("notification is empty, which NIXL does not deliver; send at least one byte")
    return bytes(payload)


def _paired(remote: Sequence[BlockRef], local: Sequence[BlockRef]) -> tuple[DescriptorArray, DescriptorArray]:
    """Both lists as arrays, known to fit each other."""
    if len(remote) != len(local) or not len(remote):
        raise InvalidDescriptorError(
            f"{len(remote)} remote and {len(local)} local blocks; expected as many, at least 1"
        )
    there, here = descriptors(remote), descriptors(local)
    wrong = np.flatnonzero((there[:, 1] != here[:, 1]) | (there[:, 1] == 0))
    if wrong.size:
        first = int(wrong[0])
        raise InvalidDescriptorError(
            f"block {first} is {there[first, 1]} bytes remote and {here[first, 1]} local; expected as many, at least 1"
        )
    return there, here
