"""Starts the workers, restarts one that dies, and ends them all together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final

import uvloop

from kvduplex_router.compose import compose_ledger, compose_members
from kvduplex_router.config import DiscoveryConfig, RouterConfig
from kvduplex_router.conversations.endpoints import LedgerTarget
from kvduplex_router.serving import HURRY, bind
from kvduplex_router.workers.hub import Hub
from kvduplex_router.workers.worker import work

__all__ = ["run_workers"]

_log = logging.getLogger("kvduplex.router.workers")
_RESTART_S: Final = 1.0
_KILL_S: Final = 3.0
"""Seconds a worker has for the end of what it cuts off, and for its own."""


def run_workers(config: RouterConfig) -> None:
    """Serve with `config.workers` processes until SIGINT or SIGTERM.

    Every worker listens on a socket of its own at the one address, so that the kernel spreads connections over them
    however busy each is. This process keeps those sockets open: a worker that is restarted finds its connections
    waiting.

    Raises:
        ConfigError: An address cannot be bound.
    """
    write_s = config.timeouts.client_write_s
    with contextlib.ExitStack() as stack:
        stack.enter_context(bind(config.listen, write_s=write_s)).close()  # fails when another process serves there
        listeners = [
            stack.enter_context(bind(config.listen, write_s=write_s, shared=True)) for _ in range(config.workers)
        ]
        admin = stack.enter_context(bind(config.admin.listen, write_s=write_s)) if config.admin.listen else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvduplex-router-")))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(_supervise(config, folder / "hub", listeners, admin))


async def _supervise(
    config: RouterConfig, path: Path, listeners: list[socket.socket], admin: socket.socket | None
) -> None:
    service = compose_ledger(config)
    members, discovery = compose_members(config, LedgerTarget(config, service.ledger))
    await discovery.look_once()
    hub = Hub(service.ledger, members)
    config = config.model_copy(update={"discovery": DiscoveryConfig()})  # workers are told by the hub
    await hub.start(path)
    stop, hurry = asyncio.Event(), asyncio.Event()
    with _stopped_by_signals(stop, hurry):
        keeping = asyncio.gather(service.run(), discovery.run())
        try:
            async with asyncio.TaskGroup() as group:
                for index, listener in enumerate(listeners):
                    aside = admin if index == 0 else None
                    group.create_task(_keep_running(index, config, path, listener, aside, stop, hurry))
        finally:
            await hub.close()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def _keep_running(
    index: int,
    config: RouterConfig,
    path: Path,
    listener: socket.socket,
    admin: socket.socket | None,
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> None:
    context = multiprocessing.get_context("spawn")
    while not stop.is_set():
        process = context.Process(target=work, args=(config, str(path), listener, admin), name=f"worker-{index}")
        process.start()
        await _until_ended(process, stop)
        if stop.is_set():
            for each in filter(None, (listener, admin)):
                each.close()  # a copy left open would take connections that nobody serves
            await _end(process, config.timeouts.shutdown_s, hurry)
            return
        _log.error("worker %d (pid %s) ended with %s; starting another", index, process.pid, process.exitcode)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESTART_S):
                await stop.wait()


async def _until_ended(process: SpawnProcess, stop: asyncio.Event) -> None:
    """Return when the process has ended, or when all are to stop."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process.sentinel, ended.set)
    waits = [asyncio.create_task(event.wait()) for event in (ended, stop)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(process.sentinel)
        for wait in waits:
            wait.cancel()


async def _end(process: SpawnProcess, shutdown_s: float, hurry: asyncio.Event) -> None:
    process.terminate()
    await _ends_within(process, shutdown_s + _KILL_S, unless=hurry)
    if hurry.is_set() and process.is_alive() and process.pid is not None:
        os.kill(process.pid, HURRY)
        await _ends_within(process, _KILL_S)
    process.kill()
    await _ends_within(process, _KILL_S)
    process.join()


async def _ends_within(process: SpawnProcess, seconds: float, *, unless: asyncio.Event | None = None) -> None:
    """Return when the process has ended, when the time is over, or when the event comes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await _until_ended(process, unless or asyncio.Event())


@contextlib.contextmanager
def _stopped_by_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first signal means stop, the next one hurry."""

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
