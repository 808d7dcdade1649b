"""Everything AWS would refuse later, or that would leave a cluster useless, found before anything is paid for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvduplex.ec2.quota import quota_findings
from kvduplex.ec2.request import Fleet, LaunchRequest
from kvduplex.node.aws import explained
from kvduplex.node.config import NodeRole
from kvduplex_transfer.hostchecks.efa_layout import network_interfaces
from kvduplex_transfer.hostchecks.findings import fail, ok
from kvduplex_transfer.interface import Finding

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import ImageTypeDef, SubnetTypeDef
    from types_boto3_iam import IAMClient
    from types_boto3_service_quotas import ServiceQuotasClient
    from types_boto3_ssm import SSMClient

__all__ = ["Clients", "Facts", "inspect", "resolve_ami"]

_REMEDY = "Check the name and the region, and that your role may describe it."


@dataclass(frozen=True, slots=True)
class Clients:
    """The AWS services that preflight asks."""

    ec2: EC2Client
    iam: IAMClient
    quotas: ServiceQuotasClient
    ssm: SSMClient


@dataclass(frozen=True, slots=True)
class Facts:
    """What preflight found.

    Attributes:
        ami: Image id.
        root_device: Name of the image's root volume.
        vpc: Network of the subnet.
        zone: Availability zone of the subnet.
        findings: What was checked.
    """

    ami: str
    root_device: str
    vpc: str
    zone: str
    findings: tuple[Finding, ...]


def resolve_ami(ami: str, *, ssm: SSMClient) -> str:
    """`ami` itself, or the image id in the SSM parameter of that name.

    Raises:
        AwsError: There is no such parameter.
    """
    if ami.startswith("ami-"):
        return ami
    with explained(f"reading SSM parameter {ami}", remedy=_REMEDY):
        return ssm.get_parameter(Name=ami)["Parameter"]["Value"]


def inspect(request: LaunchRequest, clients: Clients, *, fleets: dict[NodeRole, Fleet]) -> Facts:
    """Check the machines of `fleets`, which are those of the request that do not run yet.

    Raises:
        AwsError: Image, subnet or another thing named does not exist, or AWS cannot be asked.
    """
    ami = resolve_ami(request.ami, ssm=clients.ssm)
    with explained(f"looking at image {ami}", remedy=_REMEDY):
        image = clients.ec2.describe_images(ImageIds=[ami])["Images"][0]
    with explained(f"looking at subnet {request.subnet}", remedy=_REMEDY):
        subnet = clients.ec2.describe_subnets(SubnetIds=[request.subnet])["Subnets"][0]
    findings = [
        _image(image),
        _profile(request, clients.iam),
        *_offered(fleets, subnet["AvailabilityZone"], clients.ec2),
        _addresses(request, fleets, subnet),
        *_groups(request, subnet["VpcId"], clients.ec2),
        *_reservation(request, fleets, subnet["AvailabilityZone"], clients.ec2),
        *quota_findings(_counted(request, fleets), ec2=clients.ec2, quotas=clients.quotas),
    ]
    root = image.get("RootDeviceName", "/dev/sda1")
    return Facts(ami, root, subnet["VpcId"], subnet["AvailabilityZone"], tuple(findings))


def _image(image: ImageTypeDef) -> Finding:
    architecture, state = image.get("Architecture", "unknown"), image.get("State", "unknown")
    seen = f"{image.get('ImageId')}: {architecture}, {state}"
    if (architecture, state) != ("x86_64", "available"):
        return fail(
            "launch.image",
            seen,
            "x86_64, available",
            why="the kvduplex image and the instance types it is for are x86_64",
            fix="give the id of a kvduplex image of this region with --ami",
        )
    return ok("launch.image", seen, "x86_64, available")


def _profile(request: LaunchRequest, iam: IAMClient) -> Finding:
    name = request.instance_profile
    with explained(
        f"looking at instance profile {name}", remedy=f"{_REMEDY} docs/launch.md shows the policy it needs."
    ):
        roles = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
    if not roles:
        return fail(
            "launch.instance_profile",
            f"{name} has no role",
            "a role",
            why="machines could neither be reached through Session Manager nor read their keys",
            fix=f"aws iam add-role-to-instance-profile --instance-profile-name {name} --role-name ROLE",
        )
    return ok("launch.instance_profile", f"{name} with role {roles[0]['RoleName']}", "a role")


def _offered(fleets: dict[NodeRole, Fleet], zone: str, ec2: EC2Client) -> Iterator[Finding]:
    for name in sorted({fleet.instance_type for fleet in fleets.values()}):
        with explained(f"looking where {name} is offered", remedy="Allow ec2:DescribeInstanceTypeOfferings."):
            offers = ec2.describe_instance_type_offerings(
                LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [name]}]
            )["InstanceTypeOfferings"]
        zones = sorted(offer["Location"] for offer in offers)
        expected = f"{name} offered in {zone}"
        if zone in zones:
            yield ok("launch.offering", expected, expected)
        else:
            where = f"use a subnet in {', '.join(zones)}" if zones else "use another region"
            yield fail(
                "launch.offering", f"{name} is not offered in {zone}", expected, why="it cannot run there", fix=where
            )


def _addresses(request: LaunchRequest, fleets: dict[NodeRole, Fleet], subnet: SubnetTypeDef) -> Finding:
    needed = sum(fleet.count * _addresses_of(request, role, fleet) for role, fleet in fleets.items())
    free = subnet.get("AvailableIpAddressCount", 0)
    if free < needed:
        return fail(
            "launch.addresses",
            f"{free} free in {request.subnet}",
            f"{needed} free",
            why="each machine takes an address, with EFA layout B one for every network card",
            fix="use a larger subnet, or EFA layout A",
        )
    return ok("launch.addresses", f"{free} free in {request.subnet}", f"{needed} free")


def _addresses_of(request: LaunchRequest, role: NodeRole, fleet: Fleet) -> int:
    if role is NodeRole.ROUTER:
        return 1
    return sum(interface.has_address for interface in network_interfaces(fleet.instance_type, request.efa_layout))


def _groups(request: LaunchRequest, vpc: str, ec2: EC2Client) -> Iterator[Finding]:
    if not request.security_groups:
        return
    with explained("looking at the security groups", remedy=_REMEDY):
        groups = ec2.describe_security_groups(GroupIds=list(request.security_groups))["SecurityGroups"]
    expected = f"in {vpc}; at least one lets its own members in and out with all traffic, as EFA needs"
    strangers = [group["GroupId"] for group in groups if group.get("VpcId") != vpc]
    inward = any(_to_itself(group["GroupId"], group.get("IpPermissions", [])) for group in groups)
    outward = any(_to_itself(group["GroupId"], group.get("IpPermissionsEgress", [])) for group in groups)
    if strangers or not (inward and outward):
        problem = (
            f"{', '.join(strangers)} in another network" if strangers else "none lets its members reach each other"
        )
        yield fail(
            "launch.security_groups",
            problem,
            expected,
            why="engines could not exchange KV: EFA traffic is allowed by group alone, in and out",
            fix="allow all traffic from the group to itself, in both directions, or leave --security-group out",
        )
    else:
        yield ok("launch.security_groups", ", ".join(request.security_groups), expected)


def _to_itself(group: str, permissions: object) -> bool:
    for rule in permissions if isinstance(permissions, list) else []:
        members = [pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", [])]
        if rule.get("IpProtocol") == "-1" and group in members:
            return True
    return False


def _reservation(request: LaunchRequest, fleets: dict[NodeRole, Fleet], zone: str, ec2: EC2Client) -> Iterator[Finding]:
    if request.reservation is None:
        return
    with explained(f"looking at reservation {request.reservation}", remedy=_REMEDY):
        found = ec2.describe_capacity_reservations(CapacityReservationIds=[request.reservation])
    reservation = found["CapacityReservations"][0]
    needed = sum(fleet.count for role, fleet in fleets.items() if role is not NodeRole.ROUTER)
    wanted = (request.decode.instance_type, zone, "active")
    has = tuple(str(reservation.get(key, "unknown")) for key in ("InstanceType", "AvailabilityZone", "State"))
    free = reservation.get("AvailableInstanceCount", 0)
    expected = f"{', '.join(wanted)}, {needed} free"
    seen = f"{request.reservation}: {', '.join(has)}, {free} free"
    if has != wanted or free < needed:
        yield fail(
            "launch.reservation",
            seen,
            expected,
            why="instances that target a reservation do not start outside it",
            fix="use the subnet of the reservation's zone and its instance type, and no more machines than it has free",
        )
    else:
        yield ok("launch.reservation", seen, expected)


def _counted(request: LaunchRequest, fleets: dict[NodeRole, Fleet]) -> dict[str, int]:
    """Machines by type that count against a quota; those of a reservation counted when it was made."""
    needs: dict[str, int] = {}
    for role, fleet in fleets.items():
        if request.reservation is None or role is NodeRole.ROUTER:
            needs[fleet.instance_type] = needs.get(fleet.instance_type, 0) + fleet.count
    return needs
