"""Whether the account can give what a cluster file asks for; asked before anything is paid for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvduplex.ec2.quota import quota_findings
from kvduplex.node.aws import explained
from kvduplex_infra.cluster.capacity import CapacityBlock, OnDemand, Reservation
from kvduplex_infra.cluster.model import Cluster, Fleet
from kvduplex_transfer.hostchecks.findings import fail, ok
from kvduplex_transfer.interface import Finding

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_service_quotas import ServiceQuotasClient
    from types_boto3_ssm import SSMClient

__all__ = ["Clients", "ask"]


@dataclass(frozen=True, slots=True)
class Clients:
    """The AWS services that are asked."""

    ec2: EC2Client
    quotas: ServiceQuotasClient
    ssm: SSMClient


def ask(cluster: Cluster, *, clients: Clients) -> list[Finding]:
    """What the account says, in the order of the file.

    Raises:
        AwsError: A service cannot be asked.
    """
    found = list(_images(cluster, clients.ssm))
    for role, fleet in cluster.fleets.items():
        found.append(_offering(cluster, role, fleet, clients.ec2))
        if not isinstance(fleet.capacity, OnDemand):
            found.append(_reservation(role, fleet, fleet.capacity, clients.ec2))
    found += quota_findings(on_demand_needs(cluster), ec2=clients.ec2, quotas=clients.quotas)
    return found


def on_demand_needs(cluster: Cluster) -> Counter[str]:
    """Instances by type that count against quotas: all but those of reservations and blocks."""
    needs = Counter({cluster.router.instance_type: cluster.router.count} if cluster.router.platform == "ec2" else {})
    for fleet in cluster.fleets.values():
        if isinstance(fleet.capacity, OnDemand):
            needs[fleet.instance_type] += fleet.count
    return needs


def _offering(cluster: Cluster, role: str, fleet: Fleet, ec2: EC2Client) -> Finding:
    name = fleet.instance_type
    with explained(f"looking up where {name} is offered", remedy="Allow ec2:DescribeInstanceTypeOfferings."):
        offers = ec2.describe_instance_type_offerings(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [name]}]
        )["InstanceTypeOfferings"]
    zones = sorted(offer["Location"] for offer in offers)
    expected = f"{name} in {cluster.zone}"
    if cluster.zone in zones:
        return ok(f"{role}.zone", f"{name} in {', '.join(zones)}", expected)
    nearest = f"zone: {zones[0]}" if zones else f"another region; {cluster.region} offers no {name}"
    return fail(
        f"{role}.zone",
        f"{name} in {', '.join(zones) or 'no zone'} of {cluster.region}",
        expected,
        why="EC2 cannot start the engines there",
        fix=nearest,
    )


def _reservation(role: str, fleet: Fleet, capacity: Reservation | CapacityBlock, ec2: EC2Client) -> Finding:
    check = f"{role}.capacity"
    with explained(f"looking up {capacity.id}", remedy="Check the id, the region and the account."):
        row = ec2.describe_capacity_reservations(CapacityReservationIds=[capacity.id])["CapacityReservations"][0]
    seen = {
        "type": row.get("InstanceType"),
        "zone": row.get("AvailabilityZone"),
        "state": row.get("State"),
        "instances": row.get("TotalInstanceCount", 0),
    }
    wrong = []
    if seen["type"] != fleet.instance_type:
        wrong.append(f"{role}.instance_type: {seen['type']}")
    if seen["zone"] != capacity.zone:
        wrong.append(f"{role}.capacity.zone: {seen['zone']}")
    if seen["state"] not in {"active", "scheduled"}:
        wrong.append(f"a reservation that is active, {capacity.id} is {seen['state']}")
    if row.get("TotalInstanceCount", 0) < fleet.count:
        wrong.append(f"{role}.count: {seen['instances']}")
    text = ", ".join(f"{key} {value}" for key, value in seen.items())
    expected = f"{fleet.count} {fleet.instance_type} in {capacity.zone}"
    if wrong:
        return fail(check, f"{capacity.id}: {text}", expected, why="nothing would launch from it", fix="; ".join(wrong))
    return ok(check, f"{capacity.id}: {text}", expected)


def _images(cluster: Cluster, ssm: SSMClient) -> Iterator[Finding]:
    names = {
        f"{image.ssm_parameter}:{image.ssm_version}"
        for image in (cluster.image, *([cluster.router_image] if cluster.router.platform == "ec2" else []))
        if image.ssm_parameter is not None
    }
    for name in sorted(names):
        with explained(f"looking up {name}", remedy="Allow ssm:GetParameters."):
            found = ssm.get_parameters(Names=[name])["Parameters"]
        if found:
            yield ok("image", f"{name} is {found[0].get('Value')}", "an image of this version")
        else:
            yield fail(
                "image",
                f"{name} is not there",
                "an image of this version",
                why="machines cannot start without it",
                fix="build and publish it (docs/ami.md), or give image.id",
            )
