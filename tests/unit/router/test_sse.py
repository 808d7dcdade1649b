"""Server-sent events: what is a frame, for any bytes and any cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.http.sse import FrameBuffer, FrameTooLargeError, event_data, frames

LINE_ENDS = [b"\n", b"\r\n", b"\r"]


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[tuple[bytes, bytes | None]], list[int]]:
    """Frames with the data they carry, and where to cut their bytes."""
    text = st.binary(max_size=20).map(lambda raw: raw.replace(b"\r", b"").replace(b"\n", b""))
    built = []
    for _ in range(draw(st.integers(0, 6))):
        lines, data = [], []
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["data", "comment", "id", "bare"]))
            value = draw(text)
            if kind == "data":
                space = draw(st.sampled_from([b"", b" "]))
                lines.append(b"data:" + space + value)
                data.append(value[1:] if not space and value.startswith(b" ") else value)
            elif kind == "comment":
                lines.append(b":" + value)
            elif kind == "id":
                lines.append(b"id: 1")
            else:
                lines.append(b"event")
        end = draw(st.sampled_from(LINE_ENDS))
        built.append((end.join(lines) + end + end, b"\n".join(data) if data else None))
    total = sum(len(frame) for frame, _ in built)
    return built, sorted(set(draw(st.lists(st.integers(0, total), max_size=8))))


def pieces(raw: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *cuts, len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges) if b > a]


@given(streams())
def test_frames_come_out_whole_and_identical(case: tuple[list[tuple[bytes, bytes | None]], list[int]]) -> None:
    built, cuts = case
    raw = b"".join(frame for frame, _ in built)
    buffer = FrameBuffer(10_000)
    blocks = [block for piece in pieces(raw, cuts) if (block := buffer.feed(piece))]
    assert b"".join(blocks) + buffer.rest == raw
    found = [data for block in blocks for frame in frames(block) if (data := event_data(frame)) is not None]
    assert found == [data for _, data in built if data is not None]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_no_byte_is_lost_or_invented(raw: bytes, cuts: list[int]) -> None:
    buffer = FrameBuffer(1000)
    blocks = [buffer.feed(piece) for piece in pieces(raw, sorted(cut for cut in cuts if cut <= len(raw)))]
    assert b"".join(blocks) + buffer.rest == raw
    for block in blocks:
        assert b"".join(frames(block)) == block
    assert b"\n\n" not in buffer.rest[:-1]


@given(st.binary(max_size=200))
def test_data_of_any_bytes(raw: bytes) -> None:
    for frame in frames(raw):
        event_data(frame)


def test_line_separators_of_unicode_are_content() -> None:
    frame = "data: a\u2028b\u0085c\n\n".encode()
    assert FrameBuffer(100).feed(frame) == frame
    assert event_data(frame) == "a\u2028b\u0085c".encode()


def test_a_frame_that_grows_beyond_the_limit() -> None:
    buffer = FrameBuffer(100)
    buffer.feed(b"data: " + b"x" * 90)
    with pytest.raises(FrameTooLargeError, match="100 bytes"):
        buffer.feed(b"x" * 20)


def test_long_frames_in_small_pieces_take_linear_time() -> None:
    buffer = FrameBuffer(50_000_000)
    for _ in range(20_000):
        assert buffer.feed(b"x" * 100) == b""
    assert len(buffer.feed(b"\n\n")) == 2_000_002
