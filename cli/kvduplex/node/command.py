"""``kvduplex node``: what the units of a provisioned machine run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvduplex.console import note, say
from kvduplex.errors import PreflightError, UsageError
from kvduplex.node.aws import session
from kvduplex.node.cloudwatch import start_cloudwatch_agent
from kvduplex.node.config import NODE_FILE, NodeConfig
from kvduplex.node.document import read_node
from kvduplex.node.engine import LOOPBACK, engine_plan_of
from kvduplex.node.machine import Machine
from kvduplex.node.manifest import ImageManifest
from kvduplex.node.metadata import InstanceMetadata
from kvduplex.node.notify import Notifier
from kvduplex.node.run_engine import run_engine
from kvduplex.node.run_router import run_router
from kvduplex.node.selftest import image_findings, node_findings
from kvduplex_transfer.hostview import LocalHost
from kvduplex_transfer.interface import HostReport, Role

__all__ = ["app"]

_SYSTEMCTL_S = 60

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run one machine of a cluster from its node file.")

NodeFile = Annotated[Path, typer.Option("--file", help="The node file.")]


@app.command()
def check(file: NodeFile = Path(NODE_FILE)) -> None:
    """Validate a node file and say what the machine would do."""
    config = _load(file)
    address = config.engine.advertised_host or LOOPBACK
    for role in config.engine_roles:  # recipe and options are only read here, and refused as the engine would
        engine_plan_of(config, role, address=address, interpreter=sys.executable)
    parts = [f"{role} engine" for role in config.engine_roles] + (["router"] if config.runs_router else [])
    say(f"{file}: cluster {config.cluster}, backend {config.backend or 'none'}: {', '.join(parts)}")


@app.command()
def selftest(
    file: NodeFile = Path(NODE_FILE),
    image: Annotated[bool, typer.Option("--image", help="Only what the image itself must have; no node file.")] = False,
) -> None:
    """Compare this machine with its image and its role; exit code 1 when engines must not be started."""
    manifest, host = ImageManifest.read(), LocalHost()
    findings = image_findings(manifest, host)
    if not image:
        findings += node_findings(_load(file), manifest, host)
    for finding in findings:
        say(f"kvduplex selftest: {finding.severity.upper():4} {finding.check}: {finding.seen}")
        if finding.fix:
            say(f"                      expected {finding.expected}; {finding.why}; to mend it: {finding.fix}")
    report = HostReport(backend=manifest.flavour, findings=findings)
    say(f"kvduplex selftest: image {manifest.flavour} {manifest.version}: {report.severity}")
    if not report.usable:
        raise typer.Exit(1)


@app.command()
def activate(file: NodeFile = Path(NODE_FILE)) -> None:
    """Start the units that the node file asks for, now and at every boot."""
    config = _load(file)
    units = [f"kvduplex-engine@{role}.service" for role in config.engine_roles]
    units += ["kvduplex-router.service"] if config.runs_router else []
    done = subprocess.run(["systemctl", "start", "--no-block", *units], check=False, timeout=_SYSTEMCTL_S)
    if done.returncode:
        raise PreflightError(f"systemctl start {' '.join(units)} failed with status {done.returncode}")
    say(f"started {', '.join(units)}")


@app.command()
def cloudwatch(file: NodeFile = Path(NODE_FILE)) -> None:
    """Start the CloudWatch agent with the configuration that the node file names, if it names one."""
    start_cloudwatch_agent(_load(file), report=say)


@app.command()
def run(
    role: Annotated[str, typer.Option(help="prefill, decode or router.")],
    file: NodeFile = Path(NODE_FILE),
) -> None:
    """Run one role until told to stop, as a systemd service of type notify or in a terminal."""
    config = _load(file)
    metadata = InstanceMetadata()
    machine = Machine(
        config=config,
        manifest=ImageManifest.read() if config.engine_roles else ImageManifest.of_this_process(),
        environ=dict(os.environ),
        metadata=metadata,
        aws=lambda: session(config.region or metadata.region()),
        notifier=Notifier.from_environ(os.environ),
        runtime=Path(os.environ.get("RUNTIME_DIRECTORY", f"/run/kvduplex/{role}")),
        cache=Path(os.environ.get("STATE_DIRECTORY", "/var/lib/kvduplex")) / "cache",
        report=note,
    )
    if role == "router":
        if not config.runs_router:
            raise UsageError(f"--role router: {file} says role {config.role}, which runs no router")
        run_router(machine)
    elif role in set(Role):
        run_engine(machine, Role(role))
    else:
        raise UsageError(f"--role {role}: unknown; choose prefill, decode or router")


def _load(file: Path) -> NodeConfig:
    return read_node(file, os.environ)
