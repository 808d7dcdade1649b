"""``kvduplex-aws-agent``: the process that speaks for a machine of an Auto Scaling group."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import boto3
from botocore.config import Config

from kvduplex.aws.publisher import Publisher
from kvduplex.aws.reporter import Place, Reporter
from kvduplex.aws.sink import CloudWatchSink
from kvduplex.aws.watch import Agent, Services
from kvduplex.node.config import NODE_FILE, Launch, NodeConfig
from kvduplex.node.document import read_node
from kvduplex.node.errors import MetadataServiceError
from kvduplex.node.metadata import InstanceMetadata
from kvduplex_transfer.hostview import LocalHost

__all__ = ["main", "metrics_urls", "publish_metrics", "services_of", "stop_on_sigterm"]

_LOOK_S = 5.0
_HTTP_PORTS = {"prefill": 8100, "decode": 8200}
_EXPORTERS = ("http://127.0.0.1:9400/metrics", "http://127.0.0.1:9010/metrics")
"""DCGM's exporter, and neuron-monitor's as the image configures it."""
_BOUNDED = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "max_attempts": 3})
_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM; ends at once, with a message, on a machine whose node file asks for nothing."""
    parser = argparse.ArgumentParser(prog="python -m kvduplex.aws", description="Report this machine to its cluster.")
    parser.add_argument(
        "--metrics-only", action="store_true", help="publish metrics and nothing else, e.g. beside a container"
    )
    only_metrics = parser.parse_args(argv).metrics_only
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = read_node(Path(NODE_FILE), os.environ)
    if only_metrics:
        publish_metrics(config, InstanceMetadata(), stop_on_sigterm())
        return
    if config.launch is None or config.drain.group is None:
        sys.stdout.write(f"{NODE_FILE}: launch and drain.group are not set; nothing to report\n")
        return
    run(config, config.launch, InstanceMetadata(), stop_on_sigterm())


def stop_on_sigterm() -> threading.Event:
    """An event that SIGTERM sets."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def publish_metrics(
    config: NodeConfig, metadata: InstanceMetadata, stop: threading.Event, *, look_s: float = _LOOK_S
) -> None:
    """Publish what this machine's services count until `stop` is set, with a look every `look_s` seconds."""
    session = boto3.session.Session(region_name=config.region or metadata.region())
    sink = CloudWatchSink(session.client("cloudwatch", config=_BOUNDED), dimensions=_dimensions(config))
    publisher = Publisher(metrics_urls(config), host=LocalHost(), publish=sink.publish, clock=time.monotonic)
    while not stop.wait(look_s):
        publisher.look()


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


def metrics_urls(config: NodeConfig) -> tuple[str, ...]:
    """Where this machine's services and exporters show what they count."""
    return (*(f"{root}/metrics" for root in _roots(config)), *(_EXPORTERS if config.engine_roles else ()))


def _roots(config: NodeConfig) -> list[str]:
    roots = [f"http://127.0.0.1:{config.engine.http_port or _HTTP_PORTS[role.value]}" for role in config.engine_roles]
    return roots + ([f"http://127.0.0.1:{config.router.port}"] if config.runs_router else [])


def services_of(config: NodeConfig, launch: Launch) -> Services:
    """Where this machine's services answer."""
    return Services(
        health=tuple(f"{root}/health" for root in _roots(config)),
        metrics=metrics_urls(config),
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
    return Reporter(
        place,
        autoscaling=session.client("autoscaling", config=_BOUNDED),
        cloudformation=session.client("cloudformation", config=_BOUNDED),
        cloudwatch=session.client("cloudwatch", config=_BOUNDED),
        dimensions=_dimensions(config),
    )


def _dimensions(config: NodeConfig) -> dict[str, str]:
    return {"Cluster": config.cluster, "Role": config.role.value}


def _target(metadata: InstanceMetadata) -> str | None:
    try:
        return metadata.target_lifecycle_state()
    except MetadataServiceError as error:
        _log.warning("%s", error)
        return None
