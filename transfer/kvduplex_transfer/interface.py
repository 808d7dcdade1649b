"""The shared transfer interface: what every accelerator backend owes, and the plain data it speaks in.

A backend is found by the entry point group ``kvduplex.backends`` and has four duties: `TransferBackend.probe` reads a
host, `TransferBackend.nixl_settings` and `TransferBackend.verify_agent` decide how NIXL runs on it,
`TransferBackend.engine_plan` says how vLLM is started on it, and `TransferBackend.open` gives an agent that moves
bytes.
This module imports nothing of ours but the errors and nothing of any vendor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

__all__ = [
    "AgentFacts",
    "BlockRef",
    "CommandResult",
    "EnginePlan",
    "Finding",
    "Host",
    "HostReport",
    "MemoryRegion",
    "MemoryType",
    "NixlSettings",
    "Notification",
    "Peer",
    "RecipeLike",
    "Region",
    "Role",
    "Severity",
    "TransferAgent",
    "TransferBackend",
    "TransferHandle",
    "TransferState",
]


class Role(StrEnum):
    """What an engine does in a prefill/decode pair."""

    PREFILL = "prefill"
    DECODE = "decode"


class Severity(StrEnum):
    """How bad a finding is. ``FAIL`` means engines must not be started."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class MemoryType(StrEnum):
    """NIXL's name for where a registered region lies."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class TransferState(StrEnum):
    """State of a read in flight."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing seen on a host.

    Attributes:
        check: Stable dotted identifier, e.g. ``efa.device_count``.
        severity: How bad it is.
        seen: What was found, with the place it was read from.
        expected: What a working host shows.
        why: What goes wrong without it.
        fix: The command or setting that repairs it; empty when ``severity`` is ``OK``.
    """

    check: str
    severity: Severity
    seen: str
    expected: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class HostReport:
    """Everything a probe found, in the order it was checked."""

    backend: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        """The worst severity among the findings; ``OK`` when there are none."""
        worst = {finding.severity for finding in self.findings}
        return next((level for level in (Severity.FAIL, Severity.WARN) if level in worst), Severity.OK)

    @property
    def usable(self) -> bool:
        """Whether engines may be started."""
        return self.severity is not Severity.FAIL


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Outcome of a vendor tool: ``returncode`` 127 means it is not installed, 124 that it ran past its deadline."""

    returncode: int
    stdout: str
    stderr: str


class Host(Protocol):
    """The injectable view of a machine, so that a directory tree can stand for a host that is not here."""

    @property
    def root(self) -> Path:
        """Folder that stands for ``/``."""

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment the engines would inherit."""

    def read_text(self, path: str) -> str | None:
        """Content of an absolute path under `root`, or None when it is absent or unreadable."""

    def glob(self, pattern: str) -> list[str]:
        """Sorted absolute paths (as on the host, without `root`) that match an absolute pattern."""

    def run(self, argv: Sequence[str], timeout_s: float = 5.0) -> CommandResult:
        """Run a read-only vendor tool; never raises for a missing tool or a timeout."""


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """How NIXL is to be run on a host.

    Attributes:
        backends: NIXL plugin names in order of preference with their parameters, e.g. ``{"UCX": {}}``.
        memory_type: Where KV blocks lie as NIXL sees it.
        kv_buffer_device: vLLM's ``kv_buffer_device`` for this backend.
        environment: Variables that must be set before the agent, or any vendor runtime, starts.
        num_threads: NIXL worker threads.
        prog_thread: Whether NIXL runs a progress thread of its own.
    """

    backends: Mapping[str, Mapping[str, str]]
    memory_type: MemoryType
    kv_buffer_device: str
    environment: Mapping[str, str] = field(default_factory=dict)
    num_threads: int = 0
    prog_thread: bool = True


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What an agent really runs on, read back from NIXL after its creation.

    Attributes:
        backends: NIXL backends that came up, with the memory types each can move.
        parameters: Their parameters as NIXL reports them.
        plugins: NIXL plugins found on this host, started or not.
    """

    backends: Mapping[str, tuple[MemoryType, ...]]
    parameters: Mapping[str, Mapping[str, str]]
    plugins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Exact command and environment of one engine; `environment` is added to the inherited one.

    Attributes:
        name: Unique among the engines of a machine.
        role: What it does.
        argv: Command line, interpreter first.
        environment: Variables to add.
        url: Base URL of its HTTP server, as peers reach it.
        ports: Every TCP port it listens on, by purpose.
        lease_endpoint: ``tcp://HOST:PORT`` of its lease server; None when it has none.
        kv_blocks_ttl_s: Longest time in seconds it keeps a finished request's blocks for the next turn; None when it
            keeps none. A router must not use them later.
        ranks: Data-parallel ranks behind `url`, each with a lease server on the next port.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    url: str
    ports: Mapping[str, int]
    lease_endpoint: str | None = None
    kv_blocks_ttl_s: int | None = None
    ranks: int = 1


class RecipeLike(Protocol):
    """What `TransferBackend.engine_plan` reads from a recipe, whatever its file format."""

    @property
    def name(self) -> str:
        """Recipe name, as in ``--recipe NAME``."""

    @property
    def model(self) -> str:
        """Folder or hub id of the model."""

    def options(self, role: Role) -> Mapping[str, Any]:
        """Settings of that role."""


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Caller-owned memory to register: it must outlive the registration.

    Attributes:
        address: First byte.
        length: Bytes.
        device_id: Device ordinal; 0 for host memory.
        memory_type: Where it lies.
    """

    address: int
    length: int
    device_id: int = 0
    memory_type: MemoryType = MemoryType.DRAM


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region, valid until deregistered or until its agent closes."""

    id: int
    memory: MemoryRegion


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block of bytes inside a region of one side.

    Attributes:
        address: First byte in the owner's address space.
        length: Bytes.
        device_id: Device ordinal on the owner's host.
    """

    address: int
    length: int
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """A remote agent whose metadata was loaded."""

    name: str


@dataclass(frozen=True, slots=True)
class TransferHandle:
    """A read in flight; ends by `TransferAgent.release`, which is idempotent."""

    id: int
    peer: Peer
    bytes: int


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that arrived from a peer, in order of arrival."""

    peer: str
    payload: bytes


@runtime_checkable
class TransferAgent(Protocol):
    """Moves blocks between registered memory of two processes. Every method may be called from any thread.

    All calls run on the agent's one owner thread and have a deadline; past it they raise `TransferTimeoutError`.
    After `close` every call but `close` raises `AgentClosedError`.
    """

    @property
    def name(self) -> str:
        """Unique agent name, as peers see it."""

    @property
    def facts(self) -> AgentFacts:
        """What this agent really runs on, for `TransferBackend.verify_agent`."""

    def register(self, regions: Sequence[MemoryRegion]) -> tuple[Region, ...]:
        """Pin memory for transfers.

        Raises:
            InvalidDescriptorError: A region is empty, overlaps a registered one, or cannot be pinned.
            BackendUnavailableError: No backend of this agent supports the memory type.
        """

    def deregister(self, regions: Sequence[Region]) -> None:
        """Unpin; regions already deregistered are ignored.

        Raises:
            InvalidDescriptorError: A read that touches one of the regions is still in flight, released or not; or a
                region is another agent's. Nothing was deregistered.
        """

    def metadata(self) -> bytes:
        """This agent's connection and registration data, to be handed to peers; taken after `register`."""

    def add_peer(self, metadata: bytes) -> Peer:
        """Load a peer's metadata; loading newer metadata of a known peer replaces the older.

        A restarted peer of the same name replaces its predecessor, whose reads in flight end as failed.

        Raises:
            MetadataError: The bytes are not an agent's metadata or are this agent's own.
            PeerLostError: The peer cannot be reached.
        """

    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer; unknown peers are ignored. Its reads in flight end as failed."""

    def read(
        self, peer: Peer, remote: Sequence[BlockRef], local: Sequence[BlockRef], *, notify: bytes | None = None
    ) -> TransferHandle:
        """Start an asynchronous one-sided read of `remote` blocks into `local` blocks, pairwise.

        When `notify` is given, the peer receives it after the last byte was read.

        Raises:
            InvalidDescriptorError: Lists are empty, differ in length or block lengths, or leave registered memory.
            UnknownPeerError: `peer` was not added or was removed.
            PeerLostError: The peer is known to be gone.
        """

    def poll(self, handle: TransferHandle) -> TransferState:
        """State of a read; never blocks on the network. A released handle reports its last state.

        A read released while pending reports ``FAILED``.
        """

    def wait(self, handle: TransferHandle, timeout_s: float) -> None:
        """Block until the read is done.

        Raises:
            TransferFailedError: It failed, or its peer was lost.
            TransferTimeoutError: It was still pending at the deadline; it stays in flight until released.
        """

    def release(self, handle: TransferHandle) -> None:
        """Give a handle back, abandoning the read when it is still in flight. Calling it again does nothing.

        NIXL cannot stop a read that the network has begun: bytes may go on arriving. The local regions therefore
        stay registered, and `deregister` refuses them, until the read really ended or the agent is closed.
        """

    def notify(self, peer: Peer, payload: bytes) -> None:
        """Send a message to a peer.

        Raises:
            UnknownPeerError: `peer` was not added or was removed.
            PeerLostError: The peer is gone.
        """

    def notifications(self) -> tuple[Notification, ...]:
        """Messages that arrived since the last call; empty when none did."""

    def close(self) -> None:
        """Release reads, deregister memory, forget peers and end the owner thread. Idempotent.

        Once it returns, nothing is written to registered memory any more. Reads in flight end as failed.

        Raises:
            TransferTimeoutError: The owner thread is stuck in native code; registered memory must not be freed.
            TransferFailedError: NIXL's agent could not be destroyed; registered memory must not be freed.
        """

    def __enter__(self) -> Self:
        """The agent itself; leaving the block closes it."""

    def __exit__(self, *exc_info: object) -> None:
        """Close the agent."""


@runtime_checkable
class TransferBackend(Protocol):
    """One accelerator's way to do disaggregated serving."""

    @property
    def name(self) -> str:
        """Entry point name: ``host``, ``neuron`` or ``gpu``."""

    def probe(self, host: Host) -> HostReport:
        """Report what `host` has and what is wrong with it. Reads only, needs no root, imports no vendor package."""

    def nixl_settings(self) -> NixlSettings:
        """How NIXL must be configured here."""

    def verify_agent(self, agent: TransferAgent) -> None:
        """Refuse a silent fallback.

        Raises:
            SilentFallbackError: The agent runs, but not on what `nixl_settings` asked for.
        """

    def engine_plan(self, recipe: RecipeLike, role: Role, index: int = 0) -> EnginePlan:
        """Command and environment that start the `index`-th engine of `role`. Pure.

        Raises:
            ConfigError: The recipe does not fit this backend.
        """

    def open(self, name: str) -> TransferAgent:
        """Open an agent over this backend's memory.

        Raises:
            BackendUnavailableError: NIXL or its plugin is missing.
            SilentFallbackError: `verify_agent` refused it.
        """
