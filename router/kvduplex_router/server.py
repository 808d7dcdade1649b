"""Serves a router on its socket until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import uvicorn
import uvloop

from kvduplex_router.compose import compose
from kvduplex_router.config import RouterConfig
from kvduplex_router.errors import ConfigError

__all__ = ["bind", "run", "serve"]

_BACKLOG: Final = 2048
_CLIENT_KEEP_ALIVE_S: Final = 75
_log = logging.getLogger("kvduplex.router")


def run(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: The address cannot be bound.
    """
    listener = bind(config.listen, write_s=config.timeouts.client_write_s)
    _calm_collector()
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, listener))


def bind(address: str, *, write_s: float) -> socket.socket:
    """A listening socket whose connections are dropped when a client neither reads nor acknowledges for `write_s`.

    Raises:
        ConfigError: The address is taken or not this machine's.
    """
    parts = urlsplit(f"//{address}")
    host, port = parts.hostname or "", parts.port or 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_s * 1000))
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"listen: cannot serve on {address}: {error.strerror}; choose another with --listen"
        ) from error
    listener.setblocking(False)
    return listener


def _calm_collector() -> None:
    """Keep the cycle collector from walking what lives for ever; requests make few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def serve(config: RouterConfig, listener: socket.socket) -> None:
    """Serve on a bound socket until the process is told to stop."""
    router = compose(config)
    settings = uvicorn.Config(
        router.asgi, http=router.protocol, loop="none", ws="none", lifespan="on", access_log=False, log_config=None,
        proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=_CLIENT_KEEP_ALIVE_S,
        backlog=_BACKLOG, timeout_graceful_shutdown=int(config.timeouts.shutdown_s),
    )  # fmt: skip
    _log.info("router on http://%s over %d engines", config.listen, len(router.fleet.engines))
    await _Server(settings).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """A server for which being told to stop is a normal end, so that the process exits with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
