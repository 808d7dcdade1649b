"""Starts a planned cluster, whatever its accelerator: show it, or check, lock, supervise and announce it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvduplex import announce, dryrun
from kvduplex.console import note, say
from kvduplex.errors import PreflightError
from kvduplex.folders import private_folder
from kvduplex.locks import LockHeldError, file_lock
from kvduplex.preflight import port_findings, refuse_failures
from kvduplex.preflight.ports import describe_process
from kvduplex.supervise import Unit, UnitKind, show_progress, supervise
from kvduplex_transfer.interface import Finding, Severity

__all__ = ["Output", "launch"]

_SCRATCH_LENGTH = 107 - len("/") - 36  # a socket's path has 107 bytes at most; engines name theirs by UUIDs


@dataclass(frozen=True, slots=True)
class Output:
    """How to tell.

    Attributes:
        dry_run: Print the commands and start nothing.
        json: One JSON line on standard output instead of text; progress as plain lines.
    """

    dry_run: bool = False
    json: bool = False


def launch(
    cluster: announce.Cluster,
    *,
    findings: Callable[[], Iterable[Finding]],
    prepare: Callable[[], None] = lambda: None,
    port_options: dict[UnitKind, str],
    runtime: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    output: Output,
) -> None:
    """Run `cluster` until it is asked to end.

    Args:
        cluster: What to run.
        findings: What this machine shows; a failure among it refuses the start. Called only when something is started.
        prepare: Last step before the start, e.g. generating a model.
        port_options: How a user chooses other ports for each kind of unit.
        runtime: Folder for lock files and scratch folders.
        environment: What every program inherits.
        timeout_s: Seconds each program has to become ready.
        output: How to tell.

    Raises:
        PreflightError: Something is missing; nothing was started.
        EngineFailedError: A program died or was not ready in time; everything else was stopped.
    """
    units = [*cluster.engines, *([cluster.router] if cluster.router else [])]
    _check_scratch(units)
    if output.dry_run:
        say(dryrun.as_json(units) if output.json else dryrun.as_shell(units))
        return
    with ExitStack() as stack:
        for port, kind in {unit.ports["http"]: unit.kind for unit in units}.items():
            stack.enter_context(_port_lock(private_folder(runtime), port, port_options[kind]))
        found = [*findings(), *port_findings(units, options=port_options)]
        refuse_failures(found)
        for warning in (each for each in found if each.severity is Severity.WARN):
            note(f"note: {warning.check}: {warning.seen}; expected: {warning.expected}; {warning.why}")
        _make_log_folder(cluster.logs)
        prepare()
        _supervise(cluster, environment=environment, timeout_s=timeout_s, as_json=output.json)


def _check_scratch(units: Iterable[Unit]) -> None:
    for unit in units:
        length = len(os.fsencode(unit.scratch)) if unit.scratch else 0
        if length > _SCRATCH_LENGTH:
            raise PreflightError(
                f"the folder {unit.scratch} has {length} bytes; Unix sockets below it allow {_SCRATCH_LENGTH}. "
                "Set XDG_RUNTIME_DIR to a shorter path."
            )


def _supervise(cluster: announce.Cluster, *, environment: Mapping[str, str], timeout_s: float, as_json: bool) -> None:
    began = time.monotonic()

    def ready(pids: Mapping[str, int]) -> None:
        seconds = time.monotonic() - began
        say(
            announce.ready_json(cluster, pids, seconds=seconds)
            if as_json
            else announce.ready_text(cluster, seconds=seconds)
        )

    waves = [list(cluster.engines), *([[cluster.router]] if cluster.router else [])]
    with show_progress(plain=as_json) as progress:
        asyncio.run(supervise(waves, environment=environment, progress=progress, on_ready=ready, timeout_s=timeout_s))


def _make_log_folder(logs: Path) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(
            f"cannot create the log folder {logs}: {error.strerror}. Choose another with --logs."
        ) from error
    if not os.access(logs, os.W_OK | os.X_OK):
        raise PreflightError(f"the log folder {logs} cannot be written to by you. Choose another with --logs.")


def _port_lock(runtime: Path, port: int, option: str) -> ExitStack:
    """Two starts at one port must not both find it free; the kernel ends the lock with its holder."""
    stack = ExitStack()
    try:
        stack.enter_context(file_lock(runtime / f"serve-{port}.lock", remove=True))
    except LockHeldError as error:
        raise PreflightError(
            f"port {port} belongs to another `kvduplex serve`: {_named(error.holder)}. "
            f"Nothing was started; end that one, or choose another: {option}."
        ) from error
    return stack


def _named(holder: str) -> str:
    pid = holder.removeprefix("process ")
    if pid.isdigit() and psutil.pid_exists(int(pid)):
        return describe_process(psutil.Process(int(pid)))
    return holder or "unknown process"
