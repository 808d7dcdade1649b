"""Finds a cluster's engines by the tags of EC2 instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvduplex.node.aws import explained
from kvduplex.node.config import Discovery
from kvduplex.node.errors import DiscoveryError
from kvduplex_transfer.host.options import HTTP_PORTS, LEASE_PORTS
from kvduplex_transfer.interface import Role

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import InstanceTypeDef

__all__ = [
    "CLUSTER_TAG",
    "DP_SIZE_TAG",
    "HTTP_PORT_TAG",
    "LEASE_PORT_TAG",
    "REPLICA_ROLE",
    "ROLE_TAG",
    "STATE_TAG",
    "Engines",
    "discover",
]

CLUSTER_TAG = "kvduplex:cluster"
ROLE_TAG = "kvduplex:role"
HTTP_PORT_TAG = "kvduplex:http-port"
LEASE_PORT_TAG = "kvduplex:lease-port"
"""``0`` when the engine serves no leases."""
DP_SIZE_TAG = "kvduplex:dp-size"
"""Data-parallel ranks behind the port, each of which is an engine to a router; absent for one."""
REPLICA_ROLE = "replica"
"""Value of `ROLE_TAG` on engines that do whole turns."""
STATE_TAG = "kvduplex:state"
"""``draining`` takes an engine out; absent otherwise."""


@dataclass(frozen=True, slots=True)
class Engines:
    """URLs of the engines of each role, in the form the router takes."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    """Engines that do whole turns; a cluster has either these or the two roles."""

    @property
    def serve_a_turn(self) -> bool:
        """Whether there is at least one of each role, or a replica."""
        return bool(self.replicas or (self.prefill and self.decode))


def discover(discovery: Discovery, *, ec2: EC2Client) -> Engines:
    """The engines that run now.

    Raises:
        DiscoveryError: EC2 cannot be asked.
    """
    if not discovery.ec2_tags:
        return Engines(discovery.prefill, discovery.decode)
    remedy = "Check that the instance's role may call ec2:DescribeInstances."
    with explained("looking up engines", DiscoveryError, remedy=remedy):
        instances = list(_running(ec2, discovery.ec2_tags))
    found: dict[Role, list[str]] = {Role.PREFILL: [], Role.DECODE: []}
    replicas: list[str] = []
    for instance in instances:
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
        role = tags.get(ROLE_TAG)
        if STATE_TAG in tags:
            continue
        if role == REPLICA_ROLE:
            url = f"http://{instance['PrivateIpAddress']}:{tags.get(HTTP_PORT_TAG, HTTP_PORTS[Role.DECODE])}"
            replicas.append(_with_parts(url, tags))
        elif role in set(Role):
            found[Role(role)].append(_url(Role(role), instance["PrivateIpAddress"], tags))
    # Sorted, so that the same engines are the same configuration.
    return Engines(tuple(sorted(found[Role.PREFILL])), tuple(sorted(found[Role.DECODE])), tuple(sorted(replicas)))


def _running(ec2: EC2Client, tags: Mapping[str, str]) -> Iterable[InstanceTypeDef]:
    filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in sorted(tags.items())]
    pages = ec2.get_paginator("describe_instances").paginate(
        Filters=[*filters, {"Name": "instance-state-name", "Values": ["running"]}]  # type: ignore[list-item]
    )
    for page in pages:
        for reservation in page["Reservations"]:
            yield from reservation.get("Instances", [])


def _url(role: Role, address: str, tags: Mapping[str, str]) -> str:
    url = f"http://{address}:{tags.get(HTTP_PORT_TAG, HTTP_PORTS[role])}"
    lease = tags.get(LEASE_PORT_TAG, str(LEASE_PORTS[role]))
    return _with_parts(url, tags, *([f"lease={address}:{lease}"] if role is Role.DECODE and lease != "0" else []))


def _with_parts(url: str, tags: Mapping[str, str], *parts: str) -> str:
    ranks = tags.get(DP_SIZE_TAG)
    every = (*parts, *(() if ranks is None else (f"dp_size={ranks}",)))
    return f"{url}#{'&'.join(every)}" if every else url
