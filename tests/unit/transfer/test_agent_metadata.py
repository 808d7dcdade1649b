"""The envelope around NIXL's metadata: what goes in comes out, and nothing else does."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_transfer.errors import MetadataError
from kvduplex_transfer.interface import MemoryRegion, MemoryType
from kvduplex_transfer.metadata import AgentMetadata, decode_metadata, encode_metadata, native_name, public_name
from kvduplex_transfer.peers import offered_regions

regions = st.lists(
    st.builds(
        MemoryRegion, st.integers(1, 1 << 47), st.integers(1, 1 << 40), st.integers(0, 7), st.sampled_from(MemoryType)
    ),
    max_size=5,
)


def metadata(*memory: MemoryRegion, native: bytes = b"native") -> AgentMetadata:
    return AgentMetadata.of(name="d0", incarnation="f00", generation=3, regions=list(memory), native=native)


def sealed(body: bytes, *, version: int = 1) -> bytes:
    return b"KVDX" + bytes([version]) + hashlib.blake2b(body, digest_size=16).digest() + body


@given(name=st.text(min_size=1), generation=st.integers(0, 1 << 60), memory=regions, native=st.binary())
def test_what_goes_in_comes_out(name: str, generation: int, memory: list[MemoryRegion], native: bytes) -> None:
    before = AgentMetadata.of(name=name, incarnation="0", generation=generation, regions=memory, native=native)

    after = decode_metadata(encode_metadata(before))

    assert after == before
    assert after.memory() == memory


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes, expected 22 to"),
        (b"nixlSerDes|Agent and much more", "starts with b'nixl', expected b'KVDX'"),
        (sealed(b"\x95", version=9), "version 9, expected 1; run the same kvduplex on both hosts"),
        (encode_metadata(metadata())[:-1], "cut short or altered"),
        (encode_metadata(metadata()) + b"x", "cut short or altered"),
        (sealed(b"\xc1"), "does not decode"),
        (sealed(msgspec.msgpack.encode(["d0"])), "does not decode"),
        (sealed(msgspec.msgpack.encode(["d0", "i", 0, [[1, 2, 3, "DISK"]], b""])), "does not decode"),
    ],
)
def test_what_it_is_not_is_said(data: bytes, message: str) -> None:
    with pytest.raises(MetadataError, match=message):
        decode_metadata(data)


@pytest.mark.parametrize(
    "memory", [(MemoryRegion(1, 0),), (MemoryRegion(10, 10), MemoryRegion(15, 10)), (MemoryRegion(-1, 10),)]
)
def test_regions_that_cannot_be_are_refused(memory: tuple[MemoryRegion, ...]) -> None:
    with pytest.raises(MetadataError, match="peer 'd0' is inconsistent"):
        offered_regions(metadata(*memory))


def test_a_restarted_agent_goes_by_another_name_in_nixl_and_the_same_for_peers() -> None:
    assert native_name("d0", "one") != native_name("d0", "two")
    assert public_name(native_name("d0", "one")) == "d0"
    assert public_name("foreign") == "foreign"
