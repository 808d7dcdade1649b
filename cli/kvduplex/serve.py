"""``kvduplex serve``: engines and router on this machine, one command per accelerator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvduplex.console import note
from kvduplex.cpu_cluster import DEFAULT_CONNECTOR, CpuCluster, Where, parse_settings, plan_cluster
from kvduplex.folders import Folders
from kvduplex.launch import Output, launch
from kvduplex.preflight import memory_findings, model_findings
from kvduplex.preflight.memory import available_bytes
from kvduplex.preflight.model import is_local, weight_bytes
from kvduplex.serve_accel import add_accelerators
from kvduplex.supervise import UnitKind
from kvduplex.tinymodel.sizes import SIZES
from kvduplex.units import check_router
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.hostview import LocalHost
from kvduplex_transfer.interface import Finding

__all__ = ["app"]

_GIB = 1 << 30
_JUDGED_HERE = ("host.ports", "host.memory")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Start prefill engines, decode engines and the router on this machine.",
)


class _Connector(StrEnum):
    """The connectors that a prefill and decode pair can have."""

    STOCK = ConnectorKind.STOCK
    LEASED = ConnectorKind.LEASED


_DEFAULT_CONNECTOR = _Connector(DEFAULT_CONNECTOR)


@app.callback()
def _group() -> None:
    """Start prefill engines, decode engines and the router on this machine."""


add_accelerators(app)


@app.command()
def cpu(
    model: Annotated[str | None, typer.Option(help="Folder or hub id; a small random model without it.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that requests give.")] = None,
    prefill: Annotated[int, typer.Option(min=1, max=100, help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=100, help="Decode engines.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the router; engines stay on 127.0.0.1.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the router.")] = 8000,
    port_offset: Annotated[int, typer.Option(help="Added to every engine port, for a second cluster.")] = 0,
    connector: Annotated[_Connector, typer.Option(help="KV connector.")] = _DEFAULT_CONNECTOR,
    prefill_prefix_cache: Annotated[bool, typer.Option(help="Whether prefill engines keep a prefix cache.")] = True,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest context in tokens.")] = None,
    kv_space: Annotated[float | None, typer.Option(min=0.01, help="KV cache of each engine in GiB.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and KV.")] = "float32",
    cores_per_engine: Annotated[int, typer.Option(min=1, help="Cores each engine computes on.")] = 1,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any engine setting: [ROLE.]KEY=VALUE; repeatable.")
    ] = None,
    router_config: Annotated[Path | None, typer.Option(help="YAML file for the router.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for log files.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds each program has to become ready.")] = 600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print commands and environment; start nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line when ready.")] = False,
) -> None:
    """Start real vLLM engines on CPU cores, KV moving between them over NIXL, and the router."""
    folders = Folders.from_environ(os.environ, home=Path.home(), uid=os.getuid())
    wishes = CpuCluster(
        model=model,
        generated=(SIZES["tiny"], folders.cache / "models" / SIZES["tiny"].folder),
        served_model_name=served_model_name,
        prefill=prefill,
        decode=decode,
        connector=ConnectorKind(connector),
        prefill_prefix_cache=prefill_prefix_cache,
        max_model_len=max_model_len,
        kv_space_gib=kv_space,
        dtype=dtype,
        cores_per_engine=cores_per_engine,
        port_offset=port_offset,
        settings=parse_settings(setting or []),
    )
    where = Where(
        host=host,
        port=port,
        logs=logs.absolute() if logs else folders.state / "logs" / f"serve-{port}",
        scratch=folders.runtime / str(port),
        cache=folders.cache,
    )
    cluster = plan_cluster(wishes, _backend(), where, router_config=router_config)
    check_router(cluster.router)
    launch(
        cluster,
        findings=lambda: _findings(wishes),
        prepare=lambda: _generate(wishes, folders.cache),
        port_options={UnitKind.ROUTER: f"--port {port + 1}", UnitKind.ENGINE: f"--port-offset {port_offset + 1000}"},
        runtime=folders.runtime,
        environment=os.environ,
        timeout_s=timeout,
        output=Output(dry_run=dry_run, json=json),
    )


def _backend() -> HostBackend:
    return HostBackend(interpreter=sys.executable)


def _findings(wishes: CpuCluster) -> Iterable[Finding]:
    # Ports and memory are judged for this very cluster instead: ports by `launch`, memory below.
    yield from (each for each in _backend().probe(LocalHost()).findings if each.check not in _JUDGED_HERE)
    found = model_findings(wishes.model) if wishes.model is not None else []
    yield from found
    if not found:
        yield from memory_findings(
            engines=wishes.prefill + wishes.decode,
            kv_bytes=round(wishes.kv_gib * _GIB),
            weight_bytes=_weight_bytes(wishes),
            available=available_bytes(),
        )


def _weight_bytes(wishes: CpuCluster) -> int | None:
    if wishes.model is None:
        return 0  # two megabytes
    return weight_bytes(Path(wishes.engine_model), wishes.dtype) if is_local(wishes.model) else None


def _generate(wishes: CpuCluster, cache: Path) -> None:
    if wishes.model is None:
        from kvduplex.tinymodel import ensure_model  # noqa: PLC0415 - numpy takes a while to import

        ensure_model(wishes.generated[0], cache, report=note)
