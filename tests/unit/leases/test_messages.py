"""Lease frames: golden bytes, round trips, and hostile input."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvduplex_transfer.leases import messages as m
from kvduplex_transfer.leases.errors import MalformedFrameError
from kvduplex_transfer.leases.states import RefusalReason

IDS = st.from_regex(r"[A-Za-z0-9._:\-]{1,128}", fullmatch=True)
NUMBERS = st.integers(0, 2**63 - 1)
SECONDS = st.floats(min_value=0.001, max_value=86_400)
REQUESTS: st.SearchStrategy[m.Request] = st.one_of(
    st.builds(m.Hello, NUMBERS),
    st.builds(m.Claim, NUMBERS, IDS, st.binary(max_size=32), st.integers(16, 32), st.binary(max_size=256)),
    st.builds(m.Finish, NUMBERS, st.booleans()),
    st.builds(m.Renew, NUMBERS, st.lists(IDS, max_size=5), st.none() | SECONDS),
    st.builds(m.Release, NUMBERS, st.lists(IDS, max_size=5)),
)
SOURCES = st.builds(m.Source, st.text(max_size=20), st.text(max_size=20), st.integers(1, 65_535), st.integers(1, 64))
REPLIES: st.SearchStrategy[m.Reply] = st.one_of(
    st.builds(m.Granted, NUMBERS, st.lists(NUMBERS, min_size=1, max_size=9), NUMBERS, SECONDS, SOURCES),
    st.builds(m.Refused, NUMBERS, st.sampled_from(RefusalReason)),
    st.builds(m.Renewed, NUMBERS, st.lists(IDS, max_size=5)),
    st.builds(m.Released, NUMBERS, st.lists(IDS, max_size=5)),
)


@given(REQUESTS)
def test_requests_survive(message: m.Request) -> None:
    assert m.decode_request(m.encode(message)) == message


@given(REPLIES)
def test_replies_survive(message: m.Reply) -> None:
    assert m.decode_reply(m.encode(message)) == message


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (m.Hello(1), "4b564c01 92 a568656c6c6f 01"),
        (
            m.Claim(7, "c-1", b"\xfe", 16, b"\x11" * 16),
            "4b564c01 96 a5636c61696d 07 a3632d31 c401fe 10 c410 11111111111111111111111111111111",
        ),
        (m.Finish(7, consumed=True), "4b564c01 93 a666696e697368 07 c3"),
        (m.Renew(2, ["c-1"], 30.0), "4b564c01 94 a572656e6577 02 91a3632d31 cb403e000000000000"),
        (m.Release(3, ["c-1"]), "4b564c01 93 a772656c65617365 03 91a3632d31"),
        (m.Refused(7, RefusalReason.EXPIRED), "4b564c01 93 a772656675736564 07 a765787069726564"),
        (
            m.Granted(7, [5, 300], 4, 20.0, m.Source("e", "h", 5700)),
            "4b564c01 96 a76772616e746564 07 9205cd012c 04 cb4034000000000000 97a165a168cd16440101 01 00",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_bytes_on_the_wire_never_change(message: m.Request | m.Reply, frame: str) -> None:
    assert m.encode(message).hex() == frame.replace(" ", "")


@given(st.binary(max_size=300))
def test_random_bytes_are_malformed_and_nothing_else(frame: bytes) -> None:
    for decode in (m.decode_request, m.decode_reply):
        with pytest.raises(MalformedFrameError):
            decode(frame)


@settings(max_examples=400)
@given(REQUESTS, st.data())
def test_damaged_frames_never_raise_anything_else(message: m.Request, data: st.DataObject) -> None:
    frame = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        with contextlib.suppress(MalformedFrameError):
            assert isinstance(m.decode_request(damaged), m.Request)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "magic"),
        (b"KV", "magic"),
        (b"KVL", "version"),
        (b"KVL\x02" + msgspec.msgpack.encode(["hello", 1]), "version"),
        (b"KVL\x01", "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["hello"]), "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["hello", -1]), "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["hello", 2**64 - 1]), "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["granted", 1]), "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["renew", 1, ["x" * 10_000], 30.0]), "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["renew", 1, ["a\n"], 30.0]), "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["renew", 1, ["a"] * 1025, 30.0]), "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["renew", 1, ["a"], float("nan")]), "content"),
        (b"KVL\x01" + msgspec.msgpack.encode(["renew", 1, ["a"], 1e9]), "content"),
        (b"KVL\x01" + b"\x91" * 100_000, "content"),
        (b"KVL\x01" + b"\xdd\xff\xff\xff\xff", "content"),
        (b"KVL\x01" + b"\0" * m.MAX_FRAME_BYTES, "content"),
    ],
    ids=range(17),
)
def test_hostile_frames_are_named(frame: bytes, reason: str) -> None:
    with pytest.raises(MalformedFrameError) as caught:
        m.decode_request(frame)
    assert caught.value.reason == reason
    assert len(str(caught.value)) < 300


def test_fields_added_by_a_newer_peer_are_ignored() -> None:
    assert m.decode_request(b"KVL\x01" + msgspec.msgpack.encode(["finish", 1, True, "new"])) == m.Finish(
        1, consumed=True
    )
