"""Ending a launched cluster, and telling what is left of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvduplex.ec2.cluster import ALIVE, Instance, instances_of
from kvduplex.ec2.errors import CapacityError
from kvduplex.ec2.resources import delete_own
from kvduplex.node.aws import explained
from kvduplex.node.discovery import CLUSTER_TAG

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

__all__ = ["leftovers", "terminate"]

_POLL_S = 5.0


def terminate(
    cluster: str,
    instances: tuple[Instance, ...],
    *,
    ec2: EC2Client,
    timeout_s: float = 900.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Terminate `instances`, wait until they are gone, and delete the cluster's own groups.

    Raises:
        CapacityError: Some were not gone in time.
        AwsError: EC2 refuses.
    """
    deadline = clock() + timeout_s
    if instances:
        with explained(f"terminating cluster {cluster}", remedy="Allow ec2:TerminateInstances."):
            ec2.terminate_instances(InstanceIds=[instance.id for instance in instances])
    while left := instances_of(cluster, ec2=ec2, states=(*ALIVE, "shutting-down")):
        if clock() >= deadline:
            names = ", ".join(f"{instance.name} ({instance.id}, {instance.state})" for instance in left)
            raise CapacityError(f"not gone after {timeout_s:g} s: {names}; run this again, they may still be charged")
        sleep(_POLL_S)
    delete_own(cluster, ec2=ec2, clock=clock, sleep=sleep)


def leftovers(cluster: str, *, ec2: EC2Client) -> Iterator[str]:
    """What still carries the cluster's tag, one line each.

    Raises:
        AwsError: EC2 cannot be asked.
    """
    tagged: list[Any] = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]}]
    with explained("looking for leftovers", remedy="Allow ec2:Describe* on volumes, interfaces and groups."):
        for instance in instances_of(cluster, ec2=ec2):
            yield f"instance {instance.id} ({instance.name}, {instance.state})"
        for volume in ec2.describe_volumes(Filters=tagged)["Volumes"]:
            yield f"volume {volume['VolumeId']} ({volume['Size']} GiB, {volume['State']})"
        for interface in ec2.describe_network_interfaces(Filters=tagged)["NetworkInterfaces"]:
            yield f"network interface {interface['NetworkInterfaceId']} ({interface['Status']})"
        for group in ec2.describe_security_groups(Filters=tagged)["SecurityGroups"]:
            yield f"security group {group['GroupId']}"
        for placement in ec2.describe_placement_groups(Filters=tagged)["PlacementGroups"]:
            yield f"placement group {placement['GroupName']}"
