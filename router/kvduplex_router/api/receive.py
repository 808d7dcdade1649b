"""Reads request bodies within bounds, and notices when a client leaves."""

from __future__ import annotations

import asyncio
from typing import Final

from kvduplex_router.api.reply import Receive
from kvduplex_router.errors import BodyTooLargeError, RequestTimeoutError

__all__ = ["ClientGoneError", "discard_body", "read_body", "until_gone"]

_LINGER_S: Final = 2.0
_LINGER_BYTES: Final = 256 * 1024 * 1024


class ClientGoneError(Exception):
    """The client closed its connection."""


async def read_body(receive: Receive, headers: dict[bytes, bytes], *, limit: int, timeout_s: float) -> bytes:
    """The whole request body.

    Raises:
        BodyTooLargeError: It is, or claims to be, larger than `limit` bytes; nothing beyond that was kept.
        RequestTimeoutError: It did not arrive within `timeout_s`.
        ClientGoneError: The client left.
    """
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    first = await _next(receive, timeout_s)
    if not first[1]:
        return first[0] if len(first[0]) <= limit else _refuse(limit)
    return await _rest(receive, first[0], limit, timeout_s)


async def _rest(receive: Receive, start: bytes, limit: int, timeout_s: float) -> bytes:
    parts, size, more = [start], len(start), True
    deadline = asyncio.get_running_loop().time() + timeout_s
    while more:
        if size > limit:
            raise _too_large(limit)
        left = deadline - asyncio.get_running_loop().time()
        part, more = await _next(receive, max(left, 0.0))
        parts.append(part)
        size += len(part)
    return b"".join(parts) if size <= limit else _refuse(limit)


async def _next(receive: Receive, timeout_s: float) -> tuple[bytes, bool]:
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
    except TimeoutError:
        raise RequestTimeoutError("the request body did not arrive in time") from None
    if message["type"] != "http.request":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


async def discard_body(receive: Receive) -> None:
    """Read on for a moment, so that a client still sending gets to read the answer before the connection ends."""
    size = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while size < _LINGER_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))
    except TimeoutError:
        return


async def until_gone(receive: Receive) -> None:
    """Return when the client closes its connection, or when the answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refuse(limit: int) -> bytes:
    raise _too_large(limit)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is larger than the limit of {limit} bytes")
