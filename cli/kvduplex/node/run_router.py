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
from kvduplex.node.errors import DiscoveryError, MetadataServiceError
from kvduplex.node.machine import Machine, stop_event, write_private
from kvduplex.node.notify import SharedNotifier
from kvduplex.node.relay import relaying
from kvduplex.node.router_process import SERVING
from kvduplex.node.routing import ENGINE_KEY_VARIABLE, STATE_PASSWORD_VARIABLE, check_router_file, router_document
from kvduplex.node.secrets import client_key_entries, read_secret
from kvduplex.node.service import Pace, Service
from kvduplex.node.succession import Running, Succession
from kvduplex.supervise.logs import tail
from kvduplex.supervise.unit import Unit, UnitKind
from kvduplex.units import router_entry
from kvduplex_transfer.interface import Role

__all__ = ["engine_urls", "router_environment", "run_router"]

_FIRST_LINES = 1000


def run_router(machine: Machine) -> None:
    """Wait for engines, start the router over them, and return after its drain.

    Raises:
        KvduplexError: A setting is wrong, no engine came, or the router failed.
    """
    keys_file = _write_client_keys(machine)
    asyncio.run(_route(machine, keys_file, router_environment(machine)))


def router_environment(machine: Machine) -> Mapping[str, str]:
    """The router's environment, which carries its secrets: they are never written to a file.

    Raises:
        SecretError: A secret cannot be read.
    """
    secrets = {ENGINE_KEY_VARIABLE: machine.engine_key(), STATE_PASSWORD_VARIABLE: machine.state_password()}
    return {**machine.environ, **{name: value for name, value in secrets.items() if value}}


def engine_urls(config: NodeConfig, *, interpreter: str) -> Engines:
    """The engines of a machine that runs everything itself, as the router takes them."""
    plans = {r: engine_plan_of(config, r, address=LOOPBACK, interpreter=interpreter) for r in config.engine_roles}
    return Engines((router_entry(plans[Role.PREFILL]),), (router_entry(plans[Role.DECODE]),))


def _write_client_keys(machine: Machine) -> Path | None:
    source = machine.config.keys.clients
    if source is None:
        return None
    text = read_secret(source, client=lambda: machine.aws().client("secretsmanager"))
    file = machine.runtime / "keys.yaml"
    write_private(file, yaml.safe_dump(client_key_entries(text, where=source.secret or source.file or "")))
    return file


async def _route(machine: Machine, keys_file: Path | None, environment: Mapping[str, str]) -> None:
    """One router after another, a new one whenever the engines change, until told to stop."""
    stop = stop_event()
    engines = await _first_engines(machine, stop)
    if engines is None:
        return
    succession = Succession[Engines](
        start=lambda wanted: _start_router(machine, wanted, keys_file, environment),
        changes=lambda known: _next_engines(machine, known, stop),
        report=machine.report,
    )
    async with relaying(_log_file(machine.config), to=sys.stdout.buffer, when=machine.config.logging.relay):
        await succession.run(engines)


def _start_router(
    machine: Machine, engines: Engines, keys_file: Path | None, environment: Mapping[str, str]
) -> Running:
    file = machine.runtime / "router.yaml"
    write_private(file, router_document(machine.config, engines, keys_file=keys_file))
    check_router_file(file)
    unit = _router_unit(machine.config, file)
    stop = asyncio.Event()
    service = Service(
        unit,
        environment=environment,
        notifier=SharedNotifier(machine.notifier.address),
        pace=Pace(start_s=60, drain_s=0, grace_s=machine.config.drain.timeout_s + 5),
        stop=stop,
        busy=_idle,
        clock=time.monotonic,
        starting=lambda: not any(SERVING in line for line in tail(unit.log, _FIRST_LINES)),
    )
    return Running.start(service, stop)


def _router_unit(config: NodeConfig, file: Path) -> Unit:
    host = config.router.bind_host
    dialed = {"0.0.0.0": LOOPBACK, "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return Unit(
        name="router",
        kind=UnitKind.ROUTER,
        argv=(sys.executable, "-m", "kvduplex.node.router_process", str(file)),
        url=f"http://{dialed}:{config.router.port}",
        log=_log_file(config),
    )


def _log_file(config: NodeConfig) -> Path:
    return Path(config.logging.folder) / "router.log"


async def _idle() -> None:
    """Nothing to wait for: the router itself lets turns end when it is told to stop."""


async def _first_engines(machine: Machine, stop: asyncio.Event) -> Engines | None:
    refresh_s = machine.config.discovery.refresh_s
    while not stop.is_set():
        engines = await _looked_up(machine) or Engines()
        if engines.serve_a_turn:
            return engines
        machine.notifier.extend(refresh_s + 60)
        machine.notifier.status(f"waiting for engines: {len(engines.prefill)} prefill, {len(engines.decode)} decode")
        await _wait(stop, refresh_s)
    return None


async def _next_engines(machine: Machine, known: Engines, stop: asyncio.Event) -> Engines | None:
    """Return the engines once there are others than `known`, or None at the order to stop."""
    discovery = machine.config.discovery
    while not stop.is_set():
        await _wait(stop, discovery.refresh_s if discovery.ec2_tags else None)
        found = None if stop.is_set() else await _looked_up(machine)
        if found is not None and found != known and found.serve_a_turn:
            machine.report(f"engines changed: {len(found.prefill)} prefill, {len(found.decode)} decode")
            return found
    machine.notifier.stopping("router drains")
    return None


async def _looked_up(machine: Machine) -> Engines | None:
    try:
        return await asyncio.to_thread(_known_engines, machine)
    except (DiscoveryError, MetadataServiceError) as error:
        machine.report(f"{error} The engines known before stay.")  # a throttled call is made up by the next
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
