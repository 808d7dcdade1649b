"""A closed-loop client for measuring routers: a fixed number of connections, each with one request at a time.

A connection takes the next request when its last one is answered, so none idles while another has work left.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Load", "drive"]


@dataclass(frozen=True, slots=True)
class Load:
    """What a run of requests looked like from outside.

    Attributes:
        requests: Answered with 200.
        errors: Answered otherwise, or not.
        seconds: Wall time.
        first_byte_p50_ms: Median time to the first byte of the answer.
        first_byte_p99_ms: 99th percentile of that.
    """

    requests: int
    errors: int
    seconds: float
    first_byte_p50_ms: float
    first_byte_p99_ms: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


async def drive(port: int, bodies: bytes | Iterable[bytes], *, connections: int, requests: int) -> Load:
    """Send `requests` requests over `connections` connections to loopback: one body again and again, or one each."""
    if isinstance(bodies, bytes):
        messages: Iterator[bytes] = itertools.repeat(_message(bodies), requests)
    else:
        messages = map(_message, itertools.islice(bodies, requests))
    began = time.perf_counter()
    results = await asyncio.gather(*(_one_connection(port, messages) for _ in range(min(connections, requests))))
    seconds = time.perf_counter() - began
    times = sorted(first for result in results for first in result)
    good = len(times)
    p99 = times[min(good - 1, int(good * 0.99))] if times else 0.0
    median = statistics.median(times) if times else 0.0
    return Load(good, requests - good, seconds, median * 1000, p99 * 1000)


def _message(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: "
    return b"%b%d\r\n\r\n%b" % (head.encode(), len(body), body)


async def _one_connection(port: int, messages: Iterator[bytes]) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    times: list[float] = []
    try:
        for message in messages:
            began = time.perf_counter()
            writer.write(message)
            good, first_s = await _answer(reader, began)
            if good:
                times.append(first_s)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return times


async def _answer(reader: asyncio.StreamReader, began: float) -> tuple[bool, float]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    first_s = time.perf_counter() - began
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
    else:
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or b"0"))
    return b" 200 " in head.partition(b"\r\n")[0], first_s
