"""Request heads as bytes: built once per engine and target, completed per request."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from kvduplex_router.http.pool import Origin

__all__ = ["forwardable", "get_request", "post_head", "post_request", "request_bytes"]

_FORBIDDEN: Final = (b"\r", b"\n", b"\0")


def forwardable(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header lines for a request; a value that could end its line is left out."""
    kept = (b"%b: %b\r\n" % (name, value) for name, value in headers if not any(c in value for c in _FORBIDDEN))
    return b"".join(kept)


@lru_cache(maxsize=4096)
def post_head(origin: Origin, target: str) -> bytes:
    """The constant part of a POST with a JSON body."""
    head = (
        f"POST {target} HTTP/1.1\r\nhost: {origin.authority}\r\naccept: application/json, text/event-stream\r\n"
        "content-type: application/json\r\n"
    )
    return head.encode("ascii") + origin.lines


def post_request(head: bytes, headers: bytes, body: bytes) -> bytes:
    """A complete POST from `post_head`, header lines and a body."""
    return b"%b%bcontent-length: %d\r\n\r\n%b" % (head, headers, len(body), body)


def request_bytes(origin: Origin, method: str, target: bytes, headers: bytes, body: bytes) -> bytes:
    """Any complete request; `target` and `headers` must be fit for a head."""
    length = b"content-length: %d\r\n" % len(body) if body or method == "POST" else b""
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b%b\r\n%b" % (
        method.encode("ascii"),
        target,
        origin.authority.encode("ascii"),
        origin.lines,
        headers,
        length,
        body,
    )


def get_request(origin: Origin, target: str, headers: bytes = b"") -> bytes:
    """A complete GET."""
    first = f"GET {target} HTTP/1.1\r\nhost: {origin.authority}\r\n"
    return first.encode("ascii") + origin.lines + headers + b"\r\n"
