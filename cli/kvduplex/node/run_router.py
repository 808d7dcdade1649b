"""Runs this machine's router, over engines that may come and go."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from kvduplex.node.config import NodeConfig, NodeRole
from kvduplex.node.discovery import Engines, discover
from kvduplex.node.engine import LOOPBACK, engine_plan_of
from kvduplex.node.machine import Machine, stop_event, write_private
from kvduplex.node.routing import ENGINE_KEY_VARIABLE, check_router_file, router_document
from kvduplex.node.secrets import client_key_entries, read_secret
from kvduplex.node.service import Pace, Service
from kvduplex.supervise.unit import Unit, UnitKind
from kvduplex_transfer.interface import Role

__all__ = ["engine_urls", "run_router"]


def run_router(machine: Machine) -> None:
    """Wait for engines, start the router over them, and return after its drain.

    Raises:
        KvduplexError: A setting is wrong, no engine came, or the router failed.
    """
    key = machine.engine_key()
    keys_file = _write_client_keys(machine)
    environment = {**machine.environ, **({ENGINE_KEY_VARIABLE: key} if key else {})}
    asyncio.run(_route(machine, keys_file, environment))


def engine_urls(config: NodeConfig, *, interpreter: str) -> Engines:
    """The engines of a machine that runs everything itself, as the router takes them."""
    plans = {r: engine_plan_of(config, r, address=LOOPBACK, interpreter=interpreter) for r in config.engine_roles}
    decode = plans[Role.DECODE]
    lease = f"#lease={decode.lease_endpoint.removeprefix('tcp://')}" if decode.lease_endpoint else ""
    return Engines((plans[Role.PREFILL].url,), (f"{decode.url}{lease}",))


def _write_client_keys(machine: Machine) -> Path | None:
    source = machine.config.keys.clients
    if source is None:
        return None
    text = read_secret(source, client=lambda: machine.aws().client("secretsmanager"))
    file = machine.runtime / "keys.yaml"
    write_private(file, yaml.safe_dump(client_key_entries(text, where=source.secret or source.file or "")))
    return file


async def _route(machine: Machine, keys_file: Path | None, environment: Mapping[str, str]) -> None:
    """Run routers one after another, a new one whenever the engines change."""
    stop, config = stop_event(), machine.config
    file = machine.runtime / "router.yaml"
    engines = await _first_engines(machine, stop)
    while engines is not None and not stop.is_set():
        write_private(file, router_document(config, engines, keys_file=keys_file))
        check_router_file(file)
        changed = asyncio.Event()
        watch = asyncio.create_task(_until_changed(machine, engines, stop, changed))
        try:
            await _router_service(machine, file, environment, changed).run()
        finally:
            watch.cancel()
            found = (await asyncio.gather(watch, return_exceptions=True))[0]
        if isinstance(found, BaseException) and not isinstance(found, asyncio.CancelledError):
            raise found
        engines = found if isinstance(found, Engines) else None


def _router_service(machine: Machine, file: Path, environment: Mapping[str, str], stop: asyncio.Event) -> Service:
    config, host = machine.config, machine.config.router.bind_host
    dialed = {"0.0.0.0": LOOPBACK, "::": "[::1]", "::1": "[::1]"}.get(host, host)
    unit = Unit(
        name="router",
        kind=UnitKind.ROUTER,
        argv=(sys.executable, "-m", "kvduplex_router", "--config", str(file)),
        url=f"http://{dialed}:{config.router.port}",
        log=Path(config.logging.folder) / "router.log",
    )

    async def idle() -> None:
        return None  # the router itself lets turns end when it is told to stop

    pace = Pace(start_s=60, drain_s=0, grace_s=config.drain.timeout_s + 5)
    return Service(
        unit,
        environment=environment,
        notifier=machine.notifier,
        pace=pace,
        stop=stop,
        busy=idle,
        clock=time.monotonic,
    )


async def _first_engines(machine: Machine, stop: asyncio.Event) -> Engines | None:
    while not stop.is_set():
        engines = await asyncio.to_thread(_known_engines, machine)
        if engines.serve_a_turn:
            return engines
        machine.notifier.extend(machine.config.discovery.refresh_s + 60)
        machine.notifier.status(f"waiting for engines: {len(engines.prefill)} prefill, {len(engines.decode)} decode")
        await _wait(stop, machine.config.discovery.refresh_s)
    return None


async def _until_changed(
    machine: Machine, known: Engines, stop: asyncio.Event, changed: asyncio.Event
) -> Engines | None:
    """Return the new engines once there are others than `known`, or None at the order to stop."""
    dynamic = bool(machine.config.discovery.ec2_tags)
    while not stop.is_set():
        await _wait(stop, machine.config.discovery.refresh_s if dynamic else None)
        if stop.is_set():
            break
        found = await asyncio.to_thread(_known_engines, machine)
        if found != known and found.serve_a_turn:
            machine.report(f"engines changed: {len(found.prefill)} prefill, {len(found.decode)} decode")
            changed.set()
            return found
    changed.set()
    return None


def _known_engines(machine: Machine) -> Engines:
    if machine.config.role is NodeRole.ALL:
        return engine_urls(machine.config, interpreter=machine.manifest.engine_python)
    discovery = machine.config.discovery
    if not discovery.ec2_tags:
        return Engines(discovery.prefill, discovery.decode)
    return discover(discovery, ec2=machine.aws().client("ec2"))


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
