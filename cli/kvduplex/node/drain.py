"""What a machine does before it goes: leave the router's sight, let turns end, tell Auto Scaling."""

from __future__ import annotations

import asyncio
import http.client
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvduplex.node.aws import explained
from kvduplex.node.config import Drain
from kvduplex.node.discovery import STATE_TAG
from kvduplex.node.errors import MetadataServiceError
from kvduplex.node.metadata import InstanceMetadata

if TYPE_CHECKING:
    from types_boto3_autoscaling import AutoScalingClient
    from types_boto3_ec2 import EC2Client

__all__ = ["complete_hook", "engine_busy", "mark_draining", "terminating"]

_GAUGE = re.compile(r"^(vllm:num_requests_(?:running|waiting))(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_TIMEOUT_S = 2.0
_TERMINATED = "Terminated"


async def engine_busy(url: str) -> str | None:
    """What a vLLM engine still has to do, from its metrics; None when it is idle or gone."""
    text = await asyncio.to_thread(_metrics, url)
    if text is None:
        return None
    counts: dict[str, float] = {}
    for name, value in _GAUGE.findall(text):
        counts[name] = counts.get(name, 0.0) + float(value)
    busy = {name.removeprefix("vllm:num_requests_"): count for name, count in counts.items() if count}
    return ", ".join(f"{count:g} {name}" for name, count in sorted(busy.items())) or None


def mark_draining(instance: str, *, ec2: EC2Client) -> None:
    """Tag this machine so that routers leave it out.

    Raises:
        AwsError: EC2 refuses.
    """
    with explained("marking this instance as draining", remedy="Its role needs ec2:CreateTags on itself."):
        ec2.create_tags(Resources=[instance], Tags=[{"Key": STATE_TAG, "Value": "draining"}])


def complete_hook(drain: Drain, instance: str, *, autoscaling: AutoScalingClient) -> None:
    """Tell Auto Scaling that the machine may go; does nothing without a lifecycle hook.

    Raises:
        AwsError: Auto Scaling refuses.
    """
    if drain.lifecycle_hook is None or drain.group is None:
        return
    with explained("completing the lifecycle hook", remedy="Its role needs autoscaling:CompleteLifecycleAction."):
        autoscaling.complete_lifecycle_action(
            LifecycleHookName=drain.lifecycle_hook,
            AutoScalingGroupName=drain.group,
            InstanceId=instance,
            LifecycleActionResult="CONTINUE",
        )


async def terminating(
    metadata: InstanceMetadata, *, every_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Return once Auto Scaling wants this instance terminated (EC2 Auto Scaling guide, target lifecycle state)."""
    while True:
        try:
            state = await asyncio.to_thread(metadata.target_lifecycle_state)
        except MetadataServiceError:
            state = None  # a missed look is made up by the next
        if state == _TERMINATED:
            return
        await sleep(every_s)


def _metrics(url: str) -> str | None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.read().decode() if answer.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
