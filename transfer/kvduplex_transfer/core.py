"""What an agent does, on its owner thread: the order of checks, native calls and bookkeeping."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from kvduplex_transfer.blocks import DescriptorArray
from kvduplex_transfer.errors import (
    AgentClosedError,
    InvalidDescriptorError,
    MetadataError,
    PeerLostError,
    TransferError,
    TransferFailedError,
)
from kvduplex_transfer.interface import AgentFacts, MemoryRegion, MemoryType, NixlSettings, Notification
from kvduplex_transfer.metadata import AgentMetadata, decode_metadata, encode_metadata, native_name, public_name
from kvduplex_transfer.native import NativeAgent
from kvduplex_transfer.peers import PeerRecord, PeerTable, offered_regions
from kvduplex_transfer.reads import Read, ReadTable
from kvduplex_transfer.regions import RegionMap

__all__ = ["AgentCore"]

_log = logging.getLogger(__name__)
_ids = itertools.count(1)  # shared by all agents of a process, so that a region or handle of one never fits another


class AgentCore:
    """State of one agent. Every method runs on the owner thread, so nothing here is locked.

    Args:
        name: The agent's name.
        incarnation: Different for every agent ever opened.
        settings: How NIXL is to run.
        clock: Monotonic seconds.
    """

    def __init__(self, *, name: str, incarnation: str, settings: NixlSettings, clock: Callable[[], float]) -> None:
        self._name = name
        self._incarnation = incarnation
        self._native = NativeAgent(native_name(name, incarnation), settings)
        self._clock = clock
        self._generation = 0
        self._memory: dict[int, MemoryRegion] = {}
        self._regions: RegionMap[int] = RegionMap()
        self._peers = PeerTable()
        self._reads = ReadTable(is_done=self._native.is_done, release=self._native.release, clock=clock)

    def start(self) -> AgentFacts:
        """Start NIXL; answers what came up."""
        return self._native.start()

    def tick(self) -> float | None:
        """Follow reads in flight; seconds until the next time, or None when nothing is in flight."""
        pause = self._reads.look()
        for peer in self._peers.drained():
            self._forget(peer)
        return pause

    def register(self, regions: Sequence[MemoryRegion]) -> list[int]:
        """Pin memory and give each region an id: all or none."""
        ids = [next(_ids) for _ in regions]
        self._enter(ids, regions)
        pinned: list[MemoryRegion] = []
        try:
            for memory_type, group in _by_type(regions).items():
                self._native.register(memory_type, group)
                pinned += group
        except TransferError:
            self._unpin(pinned)
            self._leave(regions)
            raise
        self._memory.update(zip(ids, regions, strict=True))
        self._generation += 1
        return ids

    def deregister(self, ids: Iterable[int]) -> None:
        """Unpin the regions that are still there: all or none."""
        present = {key: self._memory[key] for key in ids if key in self._memory}
        busy = self._reads.on(present)
        if busy:
            names = ", ".join(f"{read.id} from {read.peer.name!r}" for read in busy[:5])
            raise InvalidDescriptorError(
                f"{len(busy)} reads still write to these regions ({names}); wait for them, or close the agent"
            )
        if not present:
            return
        for key in present:
            del self._memory[key]
        self._leave(present.values())
        self._generation += 1
        self._unpin(present.values())

    def metadata(self) -> bytes:
        """What peers need to read from this agent."""
        return encode_metadata(
            AgentMetadata.of(
                name=self._name,
                incarnation=self._incarnation,
                generation=self._generation,
                regions=list(self._memory.values()),
                native=self._native.metadata(),
            )
        )

    def add_peer(self, data: bytes) -> str:
        """Load a peer's metadata; returns its name."""
        metadata = decode_metadata(data)
        if metadata.name == self._name:
            raise MetadataError(f"metadata is of {self._name!r}, this agent's own name; a peer needs another")
        regions = offered_regions(metadata)
        record = self._peers.incarnation(metadata.native_name)
        if record is not None and record.lost:
            self._reconnect(record)
            record = None
        if record is None:
            record = PeerRecord(metadata.name, metadata.native_name, -1, regions)
        if metadata.generation > record.generation:
            self._load(metadata)
            record.generation, record.regions = metadata.generation, regions
        replaced = self._peers.put(record)
        if replaced is not None:
            self._reads.fail_peer(replaced, PeerLostError(f"peer {replaced.name!r} was restarted"))
        return record.name

    def remove_peer(self, name: str) -> None:
        """Forget a peer, and have NIXL forget it once nothing arrives from it any more."""
        record = self._peers.retire(name)
        if record is not None:
            self._reads.fail_peer(record, PeerLostError(f"peer {name!r} was removed"))

    def read(self, peer: str, remote: DescriptorArray, local: DescriptorArray, notify: bytes) -> Read:
        """Start a read of checked block lists."""
        record = self._peers.find(peer)
        here = self._regions.locate(local, side="local")
        there = record.regions.locate(remote, side="remote")
        read = Read(next(_ids), record, here.regions, self._clock())
        types = (there.memory_type, here.memory_type)
        try:
            native, done = self._native.start_read(record.native_name, types, remote, local, notify)
        except PeerLostError:
            record.lost = True
            raise
        except TransferFailedError as error:
            read.settle(error)
            return read
        self._reads.add(read, native)
        if done:
            self._reads.end(read)
        return read

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a message."""
        record = self._peers.find(peer)
        try:
            self._native.notify(record.native_name, payload)
        except PeerLostError:
            record.lost = True
            raise

    def notifications(self) -> tuple[Notification, ...]:
        """Messages that arrived since the last call."""
        arrived = self._native.notifications()
        return tuple(
            Notification(public_name(sender), bytes(payload))
            for sender, payloads in arrived.items()
            for payload in payloads
        )

    def shut(self) -> None:
        """End NIXL. Afterwards nothing is written to memory any more."""
        writing = len(self._reads) > 0
        self._reads.drop_all(AgentClosedError(f"agent {self._name!r} was closed during the read"))
        for peer in self._peers.everyone():
            self._peers.discard(peer)
            self._forget(peer)
        if not writing:
            # With a read in flight UCX would unmap memory under it; destroying the agent unpins as well.
            self._unpin(self._memory.values())
        self._native.destroy()

    def _enter(self, ids: Sequence[int], regions: Sequence[MemoryRegion]) -> None:
        entered: list[MemoryRegion] = []
        try:
            for key, region in zip(ids, regions, strict=True):
                self._regions.add(key, region)
                entered.append(region)
        except InvalidDescriptorError:
            self._leave(entered)
            raise

    def _leave(self, regions: Iterable[MemoryRegion]) -> None:
        for region in regions:
            self._regions.remove(region)

    def _unpin(self, regions: Iterable[MemoryRegion]) -> None:
        for memory_type, group in _by_type(regions).items():
            try:
                self._native.deregister(memory_type, group)
            except TransferError as error:
                _log.warning("agent %s: %s", self._name, error)

    def _load(self, metadata: AgentMetadata) -> None:
        loaded = self._native.add_peer(metadata.native)
        if loaded != metadata.native_name:
            with suppress(TransferError):
                self._native.remove_peer(loaded)
            raise MetadataError(f"metadata is of {metadata.name!r}, but NIXL's part of it is of {loaded!r}")

    def _reconnect(self, record: PeerRecord) -> None:
        """Have NIXL forget a lost connection, so that the same incarnation can be connected to again."""
        self._reads.look()
        if record.in_flight:
            raise PeerLostError(f"peer {record.name!r} is gone and {record.in_flight} reads from it still end; retry")
        self._peers.discard(record)
        self._forget(record)

    def _forget(self, peer: PeerRecord) -> None:
        try:
            self._native.remove_peer(peer.native_name)
        except TransferError as error:
            _log.warning("agent %s: %s", self._name, error)


def _by_type(regions: Iterable[MemoryRegion]) -> Mapping[MemoryType, list[MemoryRegion]]:
    groups: dict[MemoryType, list[MemoryRegion]] = {}
    for region in regions:
        groups.setdefault(region.memory_type, []).append(region)
    return groups
