"""Peers an agent knows: their regions, whether they are gone, and which still have to be forgotten. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvduplex_transfer.errors import InvalidDescriptorError, MetadataError, PeerLostError, UnknownPeerError
from kvduplex_transfer.metadata import AgentMetadata
from kvduplex_transfer.regions import RegionMap

__all__ = ["PeerRecord", "PeerTable", "offered_regions"]


@dataclass(eq=False, slots=True)
class PeerRecord:
    """One incarnation of a peer.

    Attributes:
        name: As callers know it.
        native_name: As NIXL knows it.
        generation: Of the metadata loaded last.
        regions: Memory it offers.
        in_flight: Reads whose bytes may still arrive.
        lost: Whether it was seen to be gone.
    """

    name: str
    native_name: str
    generation: int
    regions: RegionMap[int]
    in_flight: int = field(default=0)
    lost: bool = field(default=False)


class PeerTable:
    """Peers by name, and removed ones that NIXL must keep until their last read has ended."""

    def __init__(self) -> None:
        self._known: dict[str, PeerRecord] = {}
        self._retired: dict[str, PeerRecord] = {}

    def find(self, name: str) -> PeerRecord:
        """The peer to read from.

        Raises:
            UnknownPeerError: It was never added, or was removed.
            PeerLostError: It was seen to be gone.
        """
        record = self._known.get(name)
        if record is None:
            known = ", ".join(sorted(self._known)) or "none"
            raise UnknownPeerError(f"peer {name!r} is not known (known: {known}); add_peer with its metadata first")
        if record.lost:
            raise PeerLostError(f"peer {name!r} is gone; add_peer with the metadata of its new incarnation")
        return record

    def incarnation(self, native_name: str) -> PeerRecord | None:
        """The record of exactly this incarnation, known or retired."""
        retired = self._retired.get(native_name)
        known = (record for record in self._known.values() if record.native_name == native_name)
        return retired or next(known, None)

    def put(self, record: PeerRecord) -> PeerRecord | None:
        """Make `record` the peer of its name; returns the other incarnation that it replaces."""
        self._retired.pop(record.native_name, None)
        before = self._known.get(record.name)
        self._known[record.name] = record
        if before is None or before is record:
            return None
        self._retired[before.native_name] = before
        return before

    def retire(self, name: str) -> PeerRecord | None:
        """Forget a peer by name; its record waits in `drained` for its reads. None when it is not known."""
        record = self._known.pop(name, None)
        if record is not None:
            self._retired[record.native_name] = record
        return record

    def discard(self, record: PeerRecord) -> None:
        """Drop a record that NIXL is about to forget."""
        self._retired.pop(record.native_name, None)
        if self._known.get(record.name) is record:
            del self._known[record.name]

    def drained(self) -> list[PeerRecord]:
        """Take the retired peers that no read needs any more: NIXL may forget them."""
        if not self._retired:
            return []
        ready = [record for record in self._retired.values() if record.in_flight == 0]
        for record in ready:
            del self._retired[record.native_name]
        return ready

    def everyone(self) -> list[PeerRecord]:
        """Every record that NIXL still knows."""
        return [*self._known.values(), *self._retired.values()]


def offered_regions(metadata: AgentMetadata) -> RegionMap[int]:
    """Regions of a peer's metadata.

    Raises:
        MetadataError: They are empty or overlap.
    """
    try:
        return metadata.region_map()
    except InvalidDescriptorError as error:
        raise MetadataError(f"metadata of peer {metadata.name!r} is inconsistent: {error}") from error
