"""One HTTP/1.1 request over a socket of its own, every part stamped as it leaves the socket.

The clock is read in the transport's callback, before anything is parsed, and bodies are taken apart only after the
answer has ended: what a loaded client does between reads does not reach the times.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from kvduplex_bench.errors import BenchError, UnreachableError

__all__ = ["BrokenExchangeError", "Exchange", "Origin", "exchange"]

_BODY_LIMIT: Final = 256 << 20
_CONNECT_S: Final = 10.0
_PORTS: Final = {"http": 80, "https": 443}


class BrokenExchangeError(BenchError):
    """A server took the request and did not answer it completely."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens."""

    url: str
    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str, *, option: str) -> Origin:
        """Read a base URL that the user gave as `option`.

        Raises:
            BenchError: It is not an http or https URL with a host.
        """
        try:
            parts = urlsplit(url.rstrip("/"))
            port = parts.port
        except ValueError as error:
            raise BenchError(f"{option} {url}: {error}; write http://HOST:PORT") from error
        if parts.scheme not in _PORTS or not parts.hostname:
            raise BenchError(f"{option} {url}: not a URL of a server; write http://HOST:PORT")
        tls = parts.scheme == "https"
        return cls(url.rstrip("/"), parts.hostname, port or _PORTS[parts.scheme], parts.path, tls)


@dataclass(slots=True)
class Exchange:
    """One request and its answer.

    Attributes:
        status: Status code; 0 until the head came.
        headers: Response headers by lower-case name.
        pieces: Body as it came: time of the read, and bytes.
        sent_at: When the request was handed to the socket; clock of `time.perf_counter`, as all times here.
        connect_s: Seconds that the connection took before that.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    sent_at: float = 0.0
    connect_s: float = 0.0

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self.pieces)


class _Protocol(asyncio.Protocol):
    """Stamps what arrives and finds the end of the answer; also what httptools calls."""

    def __init__(self, body_limit: int) -> None:
        self.found = Exchange()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._at = 0.0
        self._room = body_limit

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"its answer is not HTTP ({error})")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.found.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.found.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._room -= len(body)
        if self._room < 0:
            self._fail("its answer is larger than this client keeps")
            return
        self.found.pieces.append((self._at, body))

    def on_message_complete(self) -> None:
        if self.found.status >= 200 and not self.done.done():  # noqa: PLR2004 - 1xx is not the answer
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        framed = {"content-length", "transfer-encoding"} & self.found.headers.keys()
        if self.found.status and not framed and exc is None and not self.done.done():
            self.done.set_result(None)  # a body without a length ends with the connection
        self._fail(f"the connection was lost ({exc})" if exc else "the connection was closed before the answer ended")

    def _fail(self, what: str) -> None:
        if not self.done.done():
            self.done.set_exception(BrokenExchangeError(what))


async def exchange(
    origin: Origin,
    path: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    body_limit: int = _BODY_LIMIT,
) -> Exchange:
    """GET `path`, or POST `body` to it.

    Args:
        origin: The server.
        path: Below the origin's own path.
        body: JSON to post; None for a GET.
        headers: Further request headers.
        timeout_s: Longest time from connecting to the end of the answer.
        body_limit: Longest body in bytes.

    Raises:
        UnreachableError: No connection.
        BrokenExchangeError: The answer did not end, or not in time.
    """
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    context = ssl.create_default_context() if origin.tls else None
    try:
        async with asyncio.timeout(min(_CONNECT_S, timeout_s)):
            transport, protocol = await loop.create_connection(
                lambda: _Protocol(body_limit), origin.host, origin.port, ssl=context
            )
    except (OSError, TimeoutError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else error
        raise UnreachableError(f"{origin.url} cannot be reached ({reason}); is it running there?") from error
    try:
        async with asyncio.timeout(timeout_s):
            message = _head(origin, path, body, headers or {}) + (body or b"")
            protocol.found.connect_s = time.perf_counter() - began
            protocol.found.sent_at = time.perf_counter()
            transport.write(message)
            await protocol.done
    except TimeoutError as error:
        raise BrokenExchangeError(f"{origin.url}{path}: no complete answer within {timeout_s:g} s") from error
    except BrokenExchangeError as error:
        raise BrokenExchangeError(f"{origin.url}{path}: {error}") from error
    finally:
        transport.abort()
        _consume(protocol.done)
    return protocol.found


def _head(origin: Origin, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    lines = [f"{'GET' if body is None else 'POST'} {origin.path}{path} HTTP/1.1", f"host: {host}:{origin.port}"]
    lines += ["connection: close", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _consume(future: asyncio.Future[Any]) -> None:
    """A failure that nobody waits for any more is none."""
    if future.done() and not future.cancelled():
        future.exception()
    future.cancel()
