"""Asks a local HTTP server whether it is ready."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

__all__ = ["answers_ok"]

_TIMEOUT_S = 2.0


async def answers_ok(url: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Whether a GET of `url` is answered with status 200 before the deadline. Never raises for the network."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _status_line(url) == b"200"
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False


async def _status_line(url: str) -> bytes:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        request = f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        line = await reader.readuntil(b"\r\n")
        return line.split()[1] if b" " in line else b""
    finally:
        writer.close()
