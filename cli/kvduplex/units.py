"""From engine plans to supervised programs: logs, scratch folders, and the router's command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from kvduplex.errors import PreflightError
from kvduplex.supervise import Stage, Unit, UnitKind
from kvduplex_router.errors import ConfigError
from kvduplex_router.flags import config_from_argv
from kvduplex_transfer.interface import EnginePlan, Role

__all__ = ["check_router", "engine_unit", "router_argv", "router_entry", "router_unit"]

_ROUTER = ("-m", "kvduplex_router")
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def engine_unit(
    plan: EnginePlan,
    *,
    logs: Path,
    scratch: Path,
    cache: Path,
    stages: Sequence[Stage] = (),
    cores: Iterable[int] = (),
) -> Unit:
    """The program of one engine.

    Args:
        plan: Its command and environment.
        logs: Folder of log files.
        scratch: Folder below which the engine gets one for temporary files and sockets. Engines leave some behind,
            even at an orderly end, so it must not be shared.
        cache: Folder for what is worth keeping between starts.
        stages: Steps of its start.
        cores: Cores it was planned for; empty when it chooses them itself.
    """
    own = scratch / plan.name
    # Compiled helpers would otherwise go to the scratch folder, and be compiled again at each start.
    kept = {"TMPDIR": str(own), "TORCHINDUCTOR_CACHE_DIR": str(cache / "torchinductor")}
    return Unit(
        name=plan.name,
        kind=UnitKind.ENGINE,
        argv=plan.argv,
        environment={**kept, **plan.environment},
        url=plan.url,
        ports=plan.ports,
        bind_host=urlsplit(plan.url).hostname or "127.0.0.1",
        log=logs / f"{plan.name}.log",
        scratch=own,
        stages=tuple(stages),
        cores=frozenset(cores),
    )


def router_unit(
    plans: Sequence[EnginePlan],
    *,
    host: str,
    port: int,
    logs: Path,
    extra_argv: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    interpreter: str = sys.executable,
) -> Unit:
    """The program of the router over all engines; it is ready when one engine of each role answers it.

    Args:
        plans: Engines of both roles.
        host: Address to bind.
        port: Port to bind.
        logs: Folder of log files.
        extra_argv: Further flags.
        environment: Added to the inherited environment.
        interpreter: Python that has the router installed.
    """
    return Unit(
        name="router",
        kind=UnitKind.ROUTER,
        argv=(interpreter, *_ROUTER, *router_argv(plans, host=host, port=port), *extra_argv),
        environment=environment or {},
        url=f"http://{_authority(_WILDCARDS.get(host, host), port)}",
        ports={"http": port},
        bind_host=host,
        log=logs / "router.log",
        health_path="/ready",
    )


def check_router(unit: Unit | None) -> None:
    """Read a router's configuration as it will itself: engines may compile for an hour before it starts.

    Args:
        unit: As `router_unit` made it; None when none is to be started.

    Raises:
        PreflightError: It could not start with it.
    """
    if unit is None:
        return
    try:
        config_from_argv(unit.argv[1 + len(_ROUTER) :])
    except ConfigError as error:
        raise PreflightError(f"the router's configuration: {error}") from error


def router_argv(plans: Sequence[EnginePlan], *, host: str, port: int) -> list[str]:
    """Flags that tell the router its address and its engines."""
    argv = ["--listen", _authority(host, port)]
    for plan in plans:
        argv += ["--prefill" if plan.role is Role.PREFILL else "--decode", router_entry(plan)]
    kept = [plan.kv_blocks_ttl_s for plan in plans if plan.role is Role.DECODE and plan.kv_blocks_ttl_s is not None]
    if kept:
        argv += ["--decoder-kv-blocks-ttl", str(min(kept))]
    return argv


def router_entry(plan: EnginePlan) -> str:
    """An engine as a router is told of it: its URL, its lease endpoint, and its ranks where there are several."""
    parts = [f"lease={plan.lease_endpoint.removeprefix('tcp://')}"] if plan.lease_endpoint else []
    if plan.ranks > 1:
        parts.append(f"dp_size={plan.ranks}")
    return f"{plan.url}#{'&'.join(parts)}" if parts else plan.url


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
