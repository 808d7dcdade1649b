"""A launched cluster as EC2 has it, found by its tags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvduplex.ec2.errors import ClusterConflictError
from kvduplex.ec2.plan import INDEX_TAG, SPEC_TAG, Machine
from kvduplex.node.aws import explained
from kvduplex.node.discovery import CLUSTER_TAG, ROLE_TAG

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import InstanceTypeDef

__all__ = ["ALIVE", "Instance", "instances_of", "missing_machines"]

ALIVE = ("pending", "running", "stopping", "stopped")
"""States of an instance that is not on its way out."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a cluster; `spec` is empty when it was started by something else, such as CDK."""

    id: str
    role: str
    index: str
    type: str
    state: str
    address: str
    spec: str

    @classmethod
    def of(cls, found: InstanceTypeDef) -> Self:
        """Read EC2's description."""
        tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", [])}
        return cls(
            id=found["InstanceId"],
            role=tags.get(ROLE_TAG, ""),
            index=tags.get(INDEX_TAG, ""),
            type=str(found["InstanceType"]),
            state=str(found["State"]["Name"]),
            address=found.get("PrivateIpAddress", ""),
            spec=tags.get(SPEC_TAG, ""),
        )

    @property
    def name(self) -> str:
        """Role and index, e.g. ``prefill-0``."""
        return f"{self.role}-{self.index}"


def instances_of(cluster: str, *, ec2: EC2Client, states: tuple[str, ...] = ALIVE) -> tuple[Instance, ...]:
    """Instances of `cluster` in one of `states`, by role and index.

    Raises:
        AwsError: EC2 cannot be asked.
    """
    with explained(f"looking up cluster {cluster}", remedy="Allow ec2:DescribeInstances."):
        pages = ec2.get_paginator("describe_instances").paginate(
            Filters=[
                {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]},
                {"Name": "instance-state-name", "Values": list(states)},
            ]
        )
        found = [Instance.of(i) for page in pages for r in page["Reservations"] for i in r.get("Instances", [])]
    return tuple(sorted(found, key=lambda instance: (instance.role, instance.index, instance.id)))


def missing_machines(wanted: Iterable[Machine], running: Iterable[Instance], *, cluster: str) -> tuple[Machine, ...]:
    """Those of `wanted` that do not run.

    Raises:
        ClusterConflictError: Something runs under the cluster's name that was not asked for in this way.
    """
    by_name = {instance.name: instance for instance in running}
    machines = {machine.name: machine for machine in wanted}
    for name, instance in sorted(by_name.items()):
        machine = machines.get(name)
        if machine is None or instance.spec != machine.spec:
            what = "is not part of this request" if machine is None else "was started with other settings"
            raise ClusterConflictError(
                f"cluster {cluster}: {name} ({instance.id}, {instance.type}, {instance.state}) {what}; repeat the "
                f"first request, end the cluster with `kvduplex launch terminate {cluster}`, or choose another name"
            )
    return tuple(machine for name, machine in machines.items() if name not in by_name)
