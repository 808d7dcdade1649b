"""Sockets and the server on them, for a router of one process and for each worker of a larger one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, Literal, cast
from urllib.parse import urlsplit

import uvicorn

from kvduplex_router.api.app import Front
from kvduplex_router.api.protocol import ClientProtocol
from kvduplex_router.compose import Router
from kvduplex_router.config import RouterConfig
from kvduplex_router.dashboard.feed import Feed
from kvduplex_router.errors import ConfigError

__all__ = ["HURRY", "bind", "calm_collector", "log_to_stderr", "serve"]

HURRY: Final = signal.SIGUSR1
"""Tells a worker that is stopping to wait for nothing more."""

_BACKLOG: Final = 2048
_LAST_FRAMES_S: Final = 1.0
"""Seconds in which clients may take the error that ends their answer when the router stops."""
_ASIDE_S: Final = 0.1
_CLIENT_KEEP_ALIVE_S: Final = 75
_log = logging.getLogger("kvduplex.router")


def log_to_stderr() -> None:
    """Log lines of this process, one event each."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)


def bind(address: str, *, write_s: float, shared: bool = False) -> socket.socket:
    """A listening socket whose connections are dropped when a client neither reads nor acknowledges for `write_s`.

    Args:
        address: ``HOST:PORT``.
        write_s: Seconds.
        shared: Several sockets of this user may listen there, and the kernel spreads connections over them.

    Raises:
        ConfigError: The address is taken or not this machine's.
    """
    parts = urlsplit(f"//{address}")
    family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    options = [(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        options.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_s * 1000)))
    if shared:
        options.append((socket.SOL_SOCKET, socket.SO_REUSEPORT, 1))
    try:
        for option in options:
            listener.setsockopt(*option)
        listener.bind((parts.hostname, parts.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"listen: cannot serve on {address}: {error.strerror}; choose another address") from error
    listener.setblocking(False)
    return listener


def calm_collector() -> None:
    """Keep the cycle collector from walking what lives for ever; requests make few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def serve(
    router: Router,
    config: RouterConfig,
    listener: socket.socket,
    admin: socket.socket | None = None,
    *,
    worker: bool = False,
) -> None:
    """Serve on bound sockets until the process is told to stop.

    Answers in flight then have `timeouts.shutdown_s` to end; a second SIGTERM or SIGINT cuts that short.

    Args:
        router: What to serve.
        config: Its configuration.
        listener: For clients.
        admin: For operators, when they have a listener of their own.
        worker: A supervisor decides: SIGTERM stops, however often it comes, and `HURRY` cuts that short.
    """
    settings = _settings(router, router.asgi, config, lifespan="on")
    server = _Server(settings, router.feed, patience_s=config.timeouts.shutdown_s, worker=worker)
    _log.info("router on http://%s over %d engines", config.listen, len(router.fleet.engines))
    if router.admin is None or admin is None:
        await server.serve(sockets=[listener])
        return
    aside = uvicorn.Server(_settings(router, router.admin, config, lifespan="off"))
    aside.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment] # the other one decides
    task = asyncio.create_task(aside.serve(sockets=[admin]))
    try:
        await server.serve(sockets=[listener])
    finally:
        aside.should_exit = True
        if server.hurried:
            _abort(aside)
        await task


def _settings(router: Router, asgi: Front, config: RouterConfig, *, lifespan: Literal["on", "off"]) -> uvicorn.Config:
    return uvicorn.Config(
        asgi,
        http=router.protocol,
        loop="none",
        ws="none",
        lifespan=lifespan,
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_CLIENT_KEEP_ALIVE_S,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=math.ceil(config.timeouts.shutdown_s + _LAST_FRAMES_S + 2 * _ASIDE_S),
    )


def _waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """Connections that wait to be accepted; closing the listener would reset them."""
    with contextlib.suppress(OSError):
        while True:
            yield listener.accept()[0]


def _abort(server: uvicorn.Server) -> None:
    """Drop a server's connections."""
    for connection in list(server.server_state.connections):
        cast("ClientProtocol", connection).transport.abort()


class _Server(uvicorn.Server):
    """A server for which being told to stop is a normal end, so that the process exits with 0."""

    def __init__(self, settings: uvicorn.Config, feed: Feed, *, patience_s: float, worker: bool) -> None:
        super().__init__(settings)
        self._feed = feed
        self._patience_s = patience_s
        self._worker = worker
        self._hurry = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop, but serve those first whose connection the kernel has taken already."""
        taken = [client for listener in sockets or () for client in _waiting(listener)]
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        loop = asyncio.get_running_loop()
        for client in taken:
            with contextlib.suppress(OSError):  # it left
                await loop.connect_accepted_socket(self._protocol, client)
        ending = loop.create_task(self._end_in_time())
        try:
            await super().shutdown()
        finally:
            ending.cancel()

    async def _end_in_time(self) -> None:
        """When answers have had their time, or at a second signal: end them with an error, then what is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._hurry.wait()
        if count := sum(cast("ClientProtocol", each).cut() for each in list(self.server_state.connections)):
            why = "told twice to stop" if self.hurried else f"timeouts.shutdown_s ({self._patience_s:g} s) is over"
            _log.warning("turns cut off: %d; %s", count, why)
        await asyncio.sleep(_LAST_FRAMES_S)
        _abort(self)
        await asyncio.sleep(_ASIDE_S)
        for task in self.server_state.tasks:
            task.cancel()

    def _protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @property
    def hurried(self) -> bool:
        """Whether nothing is waited for any more."""
        return self._hurry.is_set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Told to stop: watchers' streams, which never end by themselves, end now; told again, all others."""
        if self.should_exit:
            if not self._worker or sig == HURRY:
                self._hurry.set()
            return
        super().handle_exit(sig, frame)
        self._closing = asyncio.get_running_loop().create_task(self._feed.close())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, HURRY) if self._worker else (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
