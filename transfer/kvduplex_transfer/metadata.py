"""What an agent hands to its peers: NIXL's own metadata in an envelope that can be checked before native code sees it.

NIXL (1.5.1) forgets a known peer when it is given a truncated update, refuses a restarted peer of the same name, and
does not say which memory a peer registered. The envelope therefore carries a digest, the incarnation of the agent
and its regions.

Layout: ``KVDX``, one version byte, 16 bytes of BLAKE2b over the rest, then a MessagePack array. The digest finds
accidents, not attackers: whoever may write metadata is trusted.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from kvduplex_transfer.errors import MetadataError
from kvduplex_transfer.interface import MemoryRegion, MemoryType
from kvduplex_transfer.regions import RegionMap

__all__ = [
    "MAX_METADATA_BYTES",
    "MAX_NAME_LENGTH",
    "AgentMetadata",
    "decode_metadata",
    "encode_metadata",
    "native_name",
    "public_name",
]

MAX_NAME_LENGTH: Final = 200
"""Characters in an agent's name."""
MAX_METADATA_BYTES: Final = 64 << 20
"""Longest metadata that is looked at."""

_MAGIC: Final = b"KVDX"
_VERSION: Final = 1
_DIGEST_BYTES: Final = 16
_HEADER_BYTES: Final = len(_MAGIC) + 1 + _DIGEST_BYTES


class _RegionRow(msgspec.Struct, array_like=True, frozen=True):
    address: int
    length: int
    device_id: int
    memory_type: MemoryType


class AgentMetadata(msgspec.Struct, array_like=True, frozen=True):
    """Contents of the envelope.

    Attributes:
        name: The agent's name, as peers see it.
        incarnation: Different for every agent ever opened, so that a restarted one is told from its predecessor.
        generation: Grows whenever the agent's regions change.
        regions: Registered memory.
        native: NIXL's metadata.
    """

    name: str
    incarnation: str
    generation: int
    regions: tuple[_RegionRow, ...]
    native: bytes

    @classmethod
    def of(
        cls, *, name: str, incarnation: str, generation: int, regions: list[MemoryRegion], native: bytes
    ) -> AgentMetadata:
        """Metadata of an agent with these regions."""
        rows = tuple(_RegionRow(r.address, r.length, r.device_id, r.memory_type) for r in regions)
        return cls(name, incarnation, generation, rows, native)

    @property
    def native_name(self) -> str:
        """Name under which NIXL knows the agent."""
        return native_name(self.name, self.incarnation)

    def memory(self) -> list[MemoryRegion]:
        """The regions as the interface's type."""
        return [MemoryRegion(row.address, row.length, row.device_id, row.memory_type) for row in self.regions]

    def region_map(self) -> RegionMap[int]:
        """The regions, found by address; keys are their positions.

        Raises:
            InvalidDescriptorError: Regions are empty or overlap.
        """
        regions: RegionMap[int] = RegionMap()
        for key, memory in enumerate(self.memory()):
            regions.add(key, memory)
        return regions


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AgentMetadata)


def encode_metadata(metadata: AgentMetadata) -> bytes:
    """Bytes to be handed to peers."""
    body = _encoder.encode(metadata)
    return b"".join((_MAGIC, bytes((_VERSION,)), _digest(body), body))


def decode_metadata(data: bytes) -> AgentMetadata:
    """Metadata from a peer.

    Raises:
        MetadataError: It is no metadata, of another version, cut short, or altered.
    """
    if not _HEADER_BYTES < len(data) <= MAX_METADATA_BYTES:
        raise MetadataError(f"metadata is {len(data)} bytes, expected {_HEADER_BYTES + 1} to {MAX_METADATA_BYTES}")
    if not data.startswith(_MAGIC):
        raise MetadataError(f"metadata starts with {data[:4]!r}, expected {_MAGIC!r}: it is not from a TransferAgent")
    if data[len(_MAGIC)] != _VERSION:
        raise MetadataError(
            f"metadata has version {data[len(_MAGIC)]}, expected {_VERSION}; run the same kvduplex on both hosts"
        )
    body = data[_HEADER_BYTES:]
    if data[len(_MAGIC) + 1 : _HEADER_BYTES] != _digest(body):
        raise MetadataError(f"metadata of {len(data)} bytes is cut short or altered: its digest does not fit")
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise MetadataError(f"metadata does not decode: {error}") from error


def native_name(name: str, incarnation: str) -> str:
    """Name of an agent in NIXL: a restarted agent must not meet its predecessor's connections."""
    return f"{name}@{incarnation}"


def public_name(native: str) -> str:
    """Name of the agent that NIXL calls `native`."""
    return native.rpartition("@")[0] or native


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
