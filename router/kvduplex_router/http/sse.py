"""Server-sent events as bytes: where frames end, and what their data says.

Frames are forwarded exactly as they came. Any legal form is understood: lines ended by LF, CRLF or CR, several data
lines, comments, frames split at any byte. Characters such as U+2028 are content here, not line ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

__all__ = ["FrameBuffer", "FrameTooLargeError", "event_data", "frames"]

_LINE_END: Final = re.compile(rb"\r\n|\r|\n")
_FRAME_END: Final = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n|\r(?!\n)|\n)")


class FrameTooLargeError(Exception):
    """A frame grew past the limit before it ended."""


class FrameBuffer:
    """Holds back the unfinished frame at the end of what arrived so far.

    Args:
        limit: Bytes one frame may have.
    """

    __slots__ = ("_parts", "_size", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def rest(self) -> bytes:
        """The bytes held back."""
        return b"".join(self._parts)

    def feed(self, data: bytes) -> bytes:
        """Add bytes and return all frames that are complete now, as one piece; empty when none is.

        Raises:
            FrameTooLargeError: The unfinished frame is larger than `limit`.
        """
        if not self._parts and data.endswith(b"\n\n"):
            return data
        # A frame's end may straddle two reads: keep up to three bytes of the last one in view.
        seam = self._parts.pop() if self._parts else b""
        window = seam + data
        end = _last_frame_end(window)
        if end == 0:
            self._hold(seam, data)
            return b""
        complete = b"".join([*self._parts, window[:end]])
        self._parts = [window[end:]] if end < len(window) else []
        self._size = len(window) - end
        return complete

    def _hold(self, seam: bytes, data: bytes) -> None:
        self._size += len(data)
        if self._size > self.limit:
            raise FrameTooLargeError(f"a server-sent event is larger than {self.limit} bytes")
        if len(seam) > _SEAM:
            self._parts.append(seam[:-_SEAM])
            seam = seam[-_SEAM:]
        self._parts.append(seam + data)


_SEAM: Final = 3


def _last_frame_end(window: bytes) -> int:
    if b"\r" not in window:
        return window.rfind(b"\n\n") + 2 if b"\n\n" in window else 0
    end = 0
    for match in _FRAME_END.finditer(window):
        end = match.end()
    return end


def frames(block: bytes) -> Iterator[bytes]:
    """Split a piece returned by `FrameBuffer.feed` into frames, each with its blank line; joined they are the piece."""
    if b"\r" not in block:
        start = 0
        while (end := block.find(b"\n\n", start)) >= 0:
            yield block[start : end + 2]
            start = end + 2
    else:
        start = 0
        for match in _FRAME_END.finditer(block):
            yield block[start : match.end()]
            start = match.end()
    if start < len(block):
        yield block[start:]


def event_data(frame: bytes) -> bytes | None:
    """The frame's data lines joined by LF, as a browser would see them; None when it has none."""
    if frame.startswith(b"data: ") and frame.endswith(b"\n\n") and frame.find(b"\n") == len(frame) - 2:
        return frame[6:-2] if b"\r" not in frame else _event_data(frame)
    return _event_data(frame)


def _event_data(frame: bytes) -> bytes | None:
    found: list[bytes] = []
    for line in _LINE_END.split(frame):
        name, _, value = line.partition(b":")
        if name == b"data":
            found.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(found) if found else None
