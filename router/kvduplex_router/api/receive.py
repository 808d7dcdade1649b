"""Reads request bodies within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from kvduplex_router.api.reply import Receive
from kvduplex_router.errors import BodyTooLargeError, UnsupportedMediaTypeError

__all__ = ["ClientGoneError", "check_media_type", "discard_body", "read_body", "until_gone"]

_JSON: Final = b"application/json"
_LINGER_S: Final = 2.0
_LINGER_BYTES: Final = 256 * 1024 * 1024


class ClientGoneError(Exception):
    """The client closed its connection."""


def check_media_type(headers: Mapping[bytes, bytes], *others: bytes) -> None:
    """Take no body but JSON that says it is, as vLLM does.

    A browser asks before it sends that to another site, and does not ask before it sends text or a form: a page could
    make its reader's browser talk to a router on the reader's machine.

    Args:
        headers: Of the request.
        others: Further media types that are read.

    Raises:
        UnsupportedMediaTypeError: The body has another type, or none.
    """
    given = headers.get(b"content-type", b"")
    if given == _JSON:
        return
    media_type = given.partition(b";")[0].strip().lower()
    if media_type != _JSON and media_type not in others:
        raise UnsupportedMediaTypeError("the body's type is not read here; send 'Content-Type: application/json'")


async def read_body(receive: Receive, headers: dict[bytes, bytes], *, limit: int) -> bytes:
    """The whole request body.

    Raises:
        BodyTooLargeError: It is, or claims to be, larger than `limit` bytes; nothing beyond that was kept.
        ClientGoneError: The client left.
    """
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        part, more = message.get("body", b""), message.get("more_body", False)
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
    return parts[0] if len(parts) == 1 else b"".join(parts)


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


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is larger than the limit of {limit} bytes")
