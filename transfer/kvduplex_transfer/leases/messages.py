"""Lease messages and their bytes. docs/protocol.md describes the same byte by byte.

A frame is the four bytes ``KVL`` and the version, then one msgpack array ``[tag, field, ...]``. Durations are seconds
from the moment the message was sent or received; no message carries a time of day.

Versions: a peer drops frames of another version. Within a version fields are only ever added at the end with a
default, and extra fields at the end are ignored, so old and new peers of one version understand each other.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvduplex_transfer.leases.chain import MAX_HASH_SIZE, MIN_HASH_SIZE
from kvduplex_transfer.leases.errors import MalformedFrameError
from kvduplex_transfer.leases.params import LEASE_ID_MAX_LENGTH, MAX_TTL_S
from kvduplex_transfer.leases.states import RefusalReason

__all__ = [
    "MAX_BLOCKS",
    "MAX_FRAME_BYTES",
    "MAX_LEASES_PER_MESSAGE",
    "VERSION",
    "Claim",
    "Finish",
    "Granted",
    "Hello",
    "Identity",
    "Refused",
    "Release",
    "Released",
    "Renew",
    "Renewed",
    "Reply",
    "Request",
    "Source",
    "decode_reply",
    "decode_request",
    "encode",
]

VERSION: Final = 1
_MAGIC: Final = b"KVL" + bytes([VERSION])

MAX_BLOCKS: Final = 32_768
"""Most blocks of one claim: a million tokens at a block size of 32."""

MAX_FRAME_BYTES: Final = 4 + MAX_BLOCKS * MAX_HASH_SIZE + 4096
"""Longest frame that is ever valid; transports refuse longer ones before they take memory."""

MAX_LEASES_PER_MESSAGE: Final = 1024
"""Most lease ids in one `Renew` or `Release`."""

_LeaseId = Annotated[str, Meta(min_length=1, max_length=LEASE_ID_MAX_LENGTH, pattern=r"^[A-Za-z0-9._:\-]+\Z")]
_LeaseIds = Annotated[list[_LeaseId], Meta(max_length=MAX_LEASES_PER_MESSAGE)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, Meta(gt=0, le=MAX_TTL_S)]
_Name = Annotated[str, Meta(max_length=512)]
_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Blocks = Annotated[list[_Number], Meta(max_length=MAX_BLOCKS)]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    """Ask who answers there."""

    nonce: _Number


class Identity(_Message, frozen=True, tag="identity"):
    """Answer to `Hello`. A changed `engine_id` means a restart: every lease of the former one is gone.

    Attributes:
        nonce: That of the `Hello`.
        engine_id: Fresh for each start of an engine.
        model: Served model, as the engine was told it.
        engine_version: vLLM's version.
        block_size: Tokens of a block.
        fingerprint: Equal on engines that may read each other's blocks.
        held: Leases alive.
        blocks_pinned: KV blocks they pin.
        budget_blocks: Most they may pin.
        lease_ttl_s: Life from a renewal that names no time.
        max_ttl_s: Longest life.
    """

    nonce: _Number
    engine_id: _Name
    model: _Name
    engine_version: _Name
    block_size: _Number
    fingerprint: Annotated[bytes, Meta(max_length=32)]
    held: _Number
    blocks_pinned: _Number
    budget_blocks: _Number
    lease_ttl_s: _Seconds
    max_ttl_s: _Seconds


class Claim(_Message, frozen=True, tag="claim"):
    """Ask to read a lease's blocks.

    Attributes:
        number: Chosen by the claimant, never used twice on one connection.
        lease: Lease id.
        fingerprint: The claimant's; see `Identity`.
        hash_size: Bytes of a block hash.
        chain: Hashes of the prompt's full blocks end to end.
    """

    number: _Number
    lease: _LeaseId
    fingerprint: Annotated[bytes, Meta(max_length=32)]
    hash_size: Annotated[int, Meta(ge=MIN_HASH_SIZE, le=MAX_HASH_SIZE)]
    chain: Annotated[bytes, Meta(max_length=MAX_BLOCKS * MAX_HASH_SIZE)]


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Where and how the granted blocks are read.

    Attributes:
        engine_id: The decode engine's, as its transfer agents know it.
        host: Where its agents shake hands.
        port: The handshake port.
        tp_size: Tensor-parallel size.
        dcp_size: Decode-context-parallel size.
        pp_size: Pipeline-parallel size.
        generation: How often the engine registered its KV memory anew.
    """

    engine_id: _Name
    host: Annotated[str, Meta(max_length=255)]
    port: _Port
    tp_size: Annotated[int, Meta(ge=1)] = 1
    dcp_size: Annotated[int, Meta(ge=1)] = 1
    pp_size: Annotated[int, Meta(ge=1)] = 1
    generation: _Number = 0


class Granted(_Message, frozen=True, tag="granted"):
    """The claim is open.

    Attributes:
        number: That of the `Claim`.
        blocks: Ids of the blocks the chain proved, first block first; never empty.
        lease_blocks: Blocks of the lease altogether.
        ttl_s: Seconds, counted from before the claim was sent, within which the read must have ended.
        source: Where to read.
    """

    number: _Number
    blocks: Annotated[list[_Number], Meta(min_length=1, max_length=MAX_BLOCKS)]
    lease_blocks: _Number
    ttl_s: _Seconds
    source: Source


class Refused(_Message, frozen=True, tag="refused"):
    """The claim is not open, and why."""

    number: _Number
    reason: RefusalReason


class Finish(_Message, frozen=True, tag="finish"):
    """Close a claim. Also cancels one whose answer did not come. Never answered.

    Attributes:
        number: That of the `Claim`.
        consumed: Whether the reader has every block, so that the lease is done.
    """

    number: _Number
    consumed: bool


class Renew(_Message, frozen=True, tag="renew"):
    """Let leases live on. Answered by `Renewed`."""

    nonce: _Number
    leases: _LeaseIds
    ttl_s: _Seconds | None = None


class Renewed(_Message, frozen=True, tag="renewed"):
    """The leases that are alive and were renewed; the others are gone."""

    nonce: _Number
    leases: _LeaseIds


class Release(_Message, frozen=True, tag="release"):
    """End leases. Answered by `Released`."""

    nonce: _Number
    leases: _LeaseIds


class Released(_Message, frozen=True, tag="released"):
    """The leases that were alive until now."""

    nonce: _Number
    leases: _LeaseIds


Request = Hello | Claim | Finish | Renew | Release
Reply = Identity | Granted | Refused | Renewed | Released

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_replies: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The frame of a message."""
    return _MAGIC + _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """What a client sent.

    Raises:
        MalformedFrameError: The bytes are no request of this version.
    """
    try:
        return _requests.decode(_body(frame))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrameError("content", str(error)[:200]) from error


def decode_reply(frame: bytes) -> Reply:
    """What a decode engine answered.

    Raises:
        MalformedFrameError: The bytes are no reply of this version.
    """
    try:
        return _replies.decode(_body(frame))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrameError("content", str(error)[:200]) from error


def _body(frame: bytes) -> bytes:
    if len(frame) > MAX_FRAME_BYTES:
        raise MalformedFrameError("content", f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are valid")
    if frame[:3] != _MAGIC[:3]:
        raise MalformedFrameError("magic", "the frame does not begin with KVL")
    if frame[3:4] != _MAGIC[3:]:
        raise MalformedFrameError(
            "version", f"version byte {frame[3:4].hex() or 'missing'}, this peer speaks {VERSION}"
        )
    return frame[4:]
