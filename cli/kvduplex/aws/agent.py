"""``kvduplex-aws-agent``: the process that speaks for a machine of an Auto Scaling group."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import cast

import boto3
from botocore.config import Config

from kvduplex.aws.reporter import Place, Reporter
from kvduplex.aws.watch import Agent, Services
from kvduplex.node.config import NODE_FILE, Launch, NodeConfig
from kvduplex.node.document import load_node
from kvduplex.node.errors import MetadataServiceError
from kvduplex.node.metadata import InstanceMetadata
from kvduplex_transfer.hostview import LocalHost

__all__ = ["main", "services_of"]

_LOOK_S = 5.0
_HTTP_PORTS = {"prefill": 8100, "decode": 8200}
_EXPORTERS = ("http://127.0.0.1:9400/metrics", "http://127.0.0.1:9010/metrics")
"""DCGM's exporter, and neuron-monitor's as the image configures it."""
_log = logging.getLogger(__name__)


def main() -> None:
    """Run until SIGTERM; ends at once, with a message, on a machine whose node file asks for nothing."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = load_node(Path(NODE_FILE).read_text())
    if config.launch is None or config.drain.group is None:
        sys.stdout.write(f"{NODE_FILE}: launch and drain.group are not set; nothing to report\n")
        return
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run(config, config.launch, InstanceMetadata(), stop)


def run(config: NodeConfig, launch: Launch, metadata: InstanceMetadata, stop: threading.Event) -> None:
    """Look every few seconds until `stop` is set."""
    agent = Agent(
        services_of(config, launch),
        host=LocalHost(),
        reporter=_reporter(config, launch, metadata),
        target=lambda: _target(metadata),
        clock=time.monotonic,
    )
    while not stop.wait(_LOOK_S):
        agent.look()


def services_of(config: NodeConfig, launch: Launch) -> Services:
    """Where this machine's services answer."""
    roots = [f"http://127.0.0.1:{config.engine.http_port or _HTTP_PORTS[role.value]}" for role in config.engine_roles]
    if config.runs_router:
        roots.append(f"http://127.0.0.1:{config.router.port}")
    return Services(
        health=tuple(f"{root}/health" for root in roots),
        metrics=(*(f"{root}/metrics" for root in roots), *(_EXPORTERS if config.engine_roles else ())),
        start_timeout_s=config.engine.start_timeout_s,
        fault_after_s=launch.fault_after_s,
    )


def _reporter(config: NodeConfig, launch: Launch, metadata: InstanceMetadata) -> Reporter:
    place = Place(
        instance_id=metadata.instance_id(),
        group=cast("str", config.drain.group),
        launch_hook=launch.lifecycle_hook,
        stack=launch.stack,
        resource=launch.resource,
    )
    session = boto3.session.Session(region_name=config.region or metadata.region())
    settings = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "max_attempts": 3})
    return Reporter(
        place,
        autoscaling=session.client("autoscaling", config=settings),
        cloudformation=session.client("cloudformation", config=settings),
        cloudwatch=session.client("cloudwatch", config=settings),
        dimensions={"Cluster": config.cluster, "Role": config.role.value},
    )


def _target(metadata: InstanceMetadata) -> str | None:
    try:
        return metadata.target_lifecycle_state()
    except MetadataServiceError as error:
        _log.warning("%s", error)
        return None
