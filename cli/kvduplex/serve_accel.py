"""``kvduplex serve neuron`` and ``kvduplex serve gpu``: a recipe's engines on this host, and the router over them."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from kvduplex.accel_cluster import AccelCluster, AccelPlan, HostRole, backend_for, catalogue_of, plan_cluster
from kvduplex.accel_fit import fit_findings
from kvduplex.announce import Cluster
from kvduplex.console import note, say
from kvduplex.cpu_cluster import parse_settings
from kvduplex.errors import UsageError
from kvduplex.folders import Folders
from kvduplex.launch import Output, launch
from kvduplex.supervise import Stage, Unit, UnitKind
from kvduplex.units import check_router, engine_unit, router_argv, router_unit
from kvduplex.vllm_stages import VLLM_STAGES
from kvduplex_router.config.addresses import check_url
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.hostchecks.findings import fail
from kvduplex_transfer.hostview import LocalHost
from kvduplex_transfer.interface import Finding
from kvduplex_transfer.recipes import Topology

__all__ = ["add_accelerators", "own_address"]

_DEADLINE_S = 2.0
_COMPILE_STAGES = (
    Stage("Generating HLO", "tracing the model"),
    Stage("ompil", "compiling graphs; the first start takes minutes to an hour"),
    Stage("arm-up", "warming up graphs"),
    Stage("armup", "warming up graphs"),
)
"""Texts that Neuron's compiler and plugin log; an unknown version only shows fewer stages."""


class _Connector(StrEnum):
    STOCK = ConnectorKind.STOCK
    LEASED = ConnectorKind.LEASED


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the router listens and logs go."""

    host: str
    port: int
    logs: Path | None
    router_flags: tuple[str, ...]


_Recipe = Annotated[str | None, typer.Option("--recipe", help="Name of a shipped recipe, or a file ending in .yaml.")]
_List = Annotated[bool, typer.Option("--list", help="List the shipped recipes.")]
_Role = Annotated[HostRole, typer.Option(help="What this host does.")]
_Router = Annotated[str | None, typer.Option(help="URL of a router on another host; none is started here.")]
_Advertise = Annotated[str | None, typer.Option(help="Address at which peers and the router reach this host.")]
_Model = Annotated[str | None, typer.Option(help="Folder or hub id in place of the recipe's.")]
_ConnectorOption = Annotated[_Connector | None, typer.Option(help="KV connector in place of the recipe's.")]
_Host = Annotated[str, typer.Option(help="Address of the router.")]
_Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the router.")]
_Set = Annotated[list[str] | None, typer.Option("--set", help="Any engine setting: [ROLE.]KEY=VALUE; repeatable.")]
_RouterConfig = Annotated[Path | None, typer.Option(help="YAML file for the router.")]
_Logs = Annotated[Path | None, typer.Option(help="Folder for log files.")]
_Timeout = Annotated[float | None, typer.Option(min=1, help="Seconds each program has to become ready.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print commands and environment; start nothing.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON line when ready.")]


def add_accelerators(app: typer.Typer) -> None:
    """Add the commands to ``kvduplex serve``."""
    neuron = "Start a recipe's engines on NeuronCores, KV moving between them over EFA, and the router."
    gpu = "Start a recipe's engines on GPUs, KV moving between them over EFA or UCX, and the router."
    app.command("neuron", help=neuron)(_command_for("neuron"))
    app.command("gpu", help=gpu)(_command_for("gpu"))


def own_address() -> str:
    """The address of this host that other hosts of its network reach, or loopback when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation range: nothing is sent, the kernel only picks a route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _command_for(backend: Literal["neuron", "gpu"]) -> Callable[..., None]:
    def serve(
        recipe: _Recipe = None,
        list_recipes: _List = False,
        role: _Role = HostRole.BOTH,
        router: _Router = None,
        advertise: _Advertise = None,
        model: _Model = None,
        connector: _ConnectorOption = None,
        host: _Host = "127.0.0.1",
        port: _Port = 8000,
        setting: _Set = None,
        router_config: _RouterConfig = None,
        logs: _Logs = None,
        timeout: _Timeout = None,
        dry_run: _DryRun = False,
        json: _Json = False,
    ) -> None:
        if list_recipes or recipe is None:
            _list(backend, asked=list_recipes)
            return
        elsewhere = _checked(router) if router is not None else None
        wishes = AccelCluster(
            backend=backend,
            recipe=recipe,
            role=role,
            router_elsewhere=elsewhere is not None,
            advertise=advertise,
            address=own_address(),
            model=model,
            common={"connector": ConnectorKind(connector)} if connector else {},
            settings=parse_settings(setting or []),
        )
        place = _Place(host, port, logs, ("--config", str(router_config.absolute())) if router_config else ())
        _start(
            plan_cluster(wishes), place, router=elsewhere, timeout_s=timeout, output=Output(dry_run=dry_run, json=json)
        )

    return serve


def _start(plan: AccelPlan, place: _Place, *, router: str | None, timeout_s: float | None, output: Output) -> None:
    folders = Folders.from_environ(os.environ, home=Path.home(), uid=os.getuid())
    cluster = _cluster(plan, place, folders)
    check_router(cluster.router)
    launch(
        cluster,
        findings=lambda: _findings(plan, router),
        prepare=lambda: _tell_router_flags(plan, place),
        port_options={
            UnitKind.ROUTER: f"--port {place.port + 1}",
            UnitKind.ENGINE: "--set http_port=PORT, side_channel_port=PORT or lease_port=PORT",
        },
        runtime=folders.runtime,
        environment=os.environ,
        timeout_s=timeout_s or plan.ready_timeout_s,
        output=output,
    )


def _tell_router_flags(plan: AccelPlan, place: _Place) -> None:
    if not plan.router_here:
        flags = router_argv(plan.plans, host=place.host, port=place.port)[2:]
        note(f"Flags for the router that is to use these engines: {' '.join(flags)}")


def _list(backend: Literal["neuron", "gpu"], *, asked: bool) -> None:
    catalogue = catalogue_of(backend)
    lines = [f"  {name:<30}{catalogue.load(name).summary}" for name in catalogue.names]
    if not asked:
        raise UsageError("\n".join([f"serve {backend} needs --recipe NAME or --recipe FILE.yaml. Shipped:", *lines]))
    say("\n".join(lines))


def _cluster(plan: AccelPlan, place: _Place, folders: Folders) -> Cluster:
    stages = (*VLLM_STAGES, *_COMPILE_STAGES) if plan.recipe.backend == "neuron" else VLLM_STAGES
    logs = place.logs.absolute() if place.logs else folders.state / "logs" / f"serve-{plan.recipe.backend}-{place.port}"
    scratch = folders.runtime / str(place.port)
    return Cluster(
        engines=[
            engine_unit(engine, logs=logs, scratch=scratch, cache=folders.cache, stages=stages) for engine in plan.plans
        ],
        roles={engine.name: engine.role for engine in plan.plans},
        router=_router(plan, place, logs) if plan.router_here else None,
        model=plan.model_name,
        logs=logs,
    )


def _router(plan: AccelPlan, place: _Place, logs: Path) -> Unit:
    unit = router_unit(plan.plans, host=place.host, port=place.port, logs=logs, extra_argv=place.router_flags)
    if plan.recipe.topology is not Topology.REPLICAS:
        return unit
    return replace(unit, argv=tuple("--engine" if word == "--decode" else word for word in unit.argv))


def _findings(plan: AccelPlan, router: str | None) -> Iterable[Finding]:
    report = backend_for(plan.recipe, plan.roles).probe(LocalHost())
    yield from (finding for finding in report.findings if finding.check != "host.ports")  # launch looks at this plan's
    yield from fit_findings(plan, report.facts, environ=os.environ)
    if router is not None:
        yield from _router_findings(router)


def _checked(router: str) -> str:
    try:
        return check_url(router)
    except ValueError as error:
        raise UsageError(f"--router: {error}") from error


def _router_findings(url: str) -> Iterable[Finding]:
    parts = urlsplit(url)
    if _answers(parts.scheme, parts.hostname or "", parts.port):
        return
    yield fail(
        "router.reachable",
        f"{url} does not answer",
        "a router that answers /health",
        why="engines that no router knows serve nobody",
        fix="start `kvduplex router` there first, check the URL, and let the security groups admit this host",
    )


def _answers(scheme: str, host: str, port: int | None) -> bool:
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=_DEADLINE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, UnicodeError, http.client.HTTPException):  # a name's label may be too long to look up
        return False
    finally:
        connection.close()
