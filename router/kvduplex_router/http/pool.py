"""A pool of connections to one engine.

Engines close idle keep-alive sockets after 5 s, so a pooled connection is retired earlier. The race that remains, a
request written while the engine's close is on its way, is retried once on a fresh connection, and only when not one
byte of an answer had come back.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from urllib.parse import urlsplit

from kvduplex_router.http.connection import Connection
from kvduplex_router.http.errors import BrokenAnswerError, ConnectError, StaleConnectionError
from kvduplex_router.http.response import Response
from kvduplex_router.http.watchdog import NEVER, Watchdog

__all__ = ["Origin", "Pool", "Timeouts"]

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Origin:
    """Where an engine's requests go, and what all of them carry.

    Attributes:
        lines: Header lines of every request there.
    """

    scheme: str
    host: str
    port: int
    lines: bytes = b""

    @classmethod
    def parse(cls, url: str, *, lines: bytes = b"") -> Origin:
        """Read ``http[s]://HOST[:PORT]``; the caller has validated it."""
        parts = urlsplit(url)
        return cls(parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme], lines)

    @cached_property
    def url(self) -> str:
        """``SCHEME://HOST:PORT``, the same for everything that one server serves."""
        return f"{self.scheme}://{self.authority}"

    @cached_property
    def authority(self) -> str:
        """``HOST:PORT`` with IPv6 hosts in brackets; the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits on an engine's silence, in seconds; there is no limit on the length of an answer.

    Attributes:
        connect_s: Until the connection is up.
        first_byte_s: From the request to the response head; a long prefill is silent for as long as it takes.
        idle_s: Between parts of the body.
        keep_alive_s: Age at which an unused pooled connection is retired; below the engines' own 5 s.
    """

    connect_s: float = 3.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0
    keep_alive_s: float = 4.0


class Pool:
    """Connections to one origin, the most recently used first."""

    def __init__(
        self, origin: Origin, *, timeouts: Timeouts, watchdog: Watchdog, tls: ssl.SSLContext | None = None
    ) -> None:
        self.origin = origin
        self._timeouts = timeouts
        self._watchdog = watchdog
        self._tls = tls
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    @property
    def open_connections(self) -> int:
        """Connections that exist, busy or idle."""
        return len(self._open)

    async def send(self, request: bytes, *, resend: bool = True) -> Response:
        """Send one complete request and wait for the response head; the caller must `Response.close` it.

        Args:
            request: Request line, headers and body.
            resend: Send it once more when a pooled connection turns out to be closed.

        Raises:
            ConnectError: No connection came up.
            StaleConnectionError: A pooled connection turned out to be closed, and `resend` is False.
            ExchangeError: The engine did not answer properly.
        """
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, request)
            except BrokenAnswerError as error:
                if connection.received:
                    raise
                if not resend:
                    raise StaleConnectionError(str(error)) from error
        return await self._exchange(await self._connect(), request)

    def close(self) -> None:
        """Drop all connections; exchanges in flight fail."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    async def _exchange(self, connection: Connection, request: bytes) -> Response:
        limits = self._timeouts
        response = connection.begin(request, first_byte_s=limits.first_byte_s, idle_s=limits.idle_s)
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    def _take_idle(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.deadline > now:
                connection.deadline = NEVER
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        origin = self.origin
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(on_idle=self._on_idle, on_closed=self._on_closed),
                    origin.host,
                    origin.port,
                    ssl=self._tls,
                )
        except TimeoutError as error:
            raise ConnectError(f"no connection within {self._timeouts.connect_s:g} s") from error
        except (OSError, ssl.SSLError) as error:
            raise ConnectError(f"connection failed: {error.strerror or type(error).__name__}") from error
        self._open.add(connection)
        self._watchdog.add(connection)
        return connection

    def _on_idle(self, connection: Connection) -> None:
        connection.deadline = asyncio.get_running_loop().time() + self._timeouts.keep_alive_s
        self._idle.append(connection)

    def _on_closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._watchdog.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
