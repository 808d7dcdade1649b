"""One worker process: a router whose ledger is the hub's."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import uvloop

from kvduplex_router.compose import Router, compose
from kvduplex_router.config import RouterConfig
from kvduplex_router.serving import calm_collector, log_to_stderr, serve
from kvduplex_router.workers.link import HubLink

__all__ = ["work"]

_CONNECT_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


def work(config: RouterConfig, hub: str, listener: socket.socket, admin: socket.socket | None) -> None:
    """Serve until told to stop, or until the hub is gone.

    Args:
        config: This worker's share of the router's configuration.
        hub: Path of the hub's socket.
        listener: For clients.
        admin: For operators, in the one worker that serves them.
    """
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all processes; the supervisor decides
    log_to_stderr()
    calm_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(config, Path(hub), listener, admin))


async def _work(config: RouterConfig, hub: Path, listener: socket.socket, admin: socket.socket | None) -> None:
    link, connected = HubLink(), asyncio.Event()
    reading = asyncio.create_task(link.run(hub, connected))
    async with asyncio.timeout(_CONNECT_S):
        await connected.wait()
    router = compose(config, ledger=link, fleet_view=link)
    link.tellers = router.tellers
    link.follow(router.members.replace)
    link.on_drain = lambda engine, draining: _drain(router, engine, draining)
    reading.add_done_callback(lambda _task: os.kill(os.getpid(), signal.SIGTERM))
    await serve(router, config, listener, admin, worker=True)


def _drain(router: Router, name: str, draining: bool) -> None:
    engine = router.fleet.find(name)
    if engine is not None:
        engine.draining = draining


def _end_with_parent() -> None:
    """Have the kernel end this process when the hub dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
