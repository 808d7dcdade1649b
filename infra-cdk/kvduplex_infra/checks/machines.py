"""Rules over launch templates and Auto Scaling groups."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvduplex.node.user_data import MAX_USER_DATA_BYTES
from kvduplex_infra.checks.assembly import Assembly, Resource
from kvduplex_infra.checks.finding import Finding, Rule
from kvduplex_transfer.hostchecks.instances import INSTANCE_TYPES

__all__ = ["RULES"]

_TYPES = {"interface", "efa", "efa-only"}
_TEMPLATE = "AWS::EC2::LaunchTemplate"
_GROUP = "AWS::AutoScaling::AutoScalingGroup"


def interfaces(assembly: Assembly) -> Iterator[Finding]:
    """Interface types are EC2's, indices fit the type, and the primary one can carry an address."""
    for template, data in _templates(assembly):
        listed = data.get("NetworkInterfaces", [])
        yield from _primary(template, listed)
        places = [(i.get("NetworkCardIndex", 0), i.get("DeviceIndex")) for i in listed]
        for place in sorted({p for p in places if places.count(p) > 1}, key=str):
            yield _finding("interfaces.twice", template, f"card {place[0]} device {place[1]} is given twice")
        for interface in listed:
            kind = interface.get("InterfaceType", "interface")
            if kind not in _TYPES:
                yield _finding("interfaces.type", template, f"InterfaceType {kind!r} is none of {sorted(_TYPES)}")
        yield from _cards(template, data, listed)


def _primary(template: Resource, listed: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    primary = [i for i in listed if i.get("NetworkCardIndex", 0) == 0 and i.get("DeviceIndex") == 0]
    if len(primary) != 1:
        yield _finding(
            "interfaces.primary", template, f"{len(primary)} interfaces on card 0 device 0; give exactly one"
        )
    elif primary[0].get("InterfaceType") == "efa-only":
        yield _finding("interfaces.primary", template, "efa-only cannot be primary: it has no address; use interface")


def _cards(template: Resource, data: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    name = data.get("InstanceType", "")
    row = INSTANCE_TYPES.get(name)
    cards = max((row.efa_interfaces or 0) if row is not None else 0, 1)
    beyond = sorted({i.get("NetworkCardIndex", 0) for i in listed if i.get("NetworkCardIndex", 0) >= cards})
    if beyond:
        yield _finding("interfaces.card", template, f"card {beyond[0]} does not exist on {name}, which has {cards}")
    with_efa = [i for i in listed if i.get("InterfaceType") in {"efa", "efa-only"}]
    if with_efa and (row is None or not row.efa_interfaces):
        yield _finding("interfaces.efa", template, f"{name} has no EFA")


def public_addresses(assembly: Assembly) -> Iterator[Finding]:
    """No machine has a public address, and the key is absent where EC2 refuses it."""
    for template, data in _templates(assembly):
        listed = data.get("NetworkInterfaces", [])
        for interface in listed:
            value = interface.get("AssociatePublicIpAddress")
            if value is not None and len(listed) > 1:
                message = "AssociatePublicIpAddress with several interfaces is refused by EC2; remove it"
                yield _finding("address.several", template, message)
            if value is True:
                yield _finding("address.public", template, "machines have no public address; use the load balancer")


def hardening(assembly: Assembly) -> Iterator[Finding]:
    """IMDSv2 only, one hop, encrypted volumes, no SSH key."""
    for template, data in _templates(assembly):
        metadata = data.get("MetadataOptions", {})
        if metadata.get("HttpTokens") != "required" or metadata.get("HttpPutResponseHopLimit") != 1:
            yield _finding("metadata", template, "HttpTokens must be required, HttpPutResponseHopLimit 1")
        for mapping in data.get("BlockDeviceMappings", []):
            if mapping.get("Ebs", {}).get("Encrypted") is not True:
                yield _finding("volume", template, f"{mapping.get('DeviceName')} is not encrypted")
        if "KeyName" in data:
            yield _finding("ssh", template, "KeyName opens SSH; machines are reached by Session Manager")


def capacity(assembly: Assembly) -> Iterator[Finding]:
    """A Capacity Block names its reservation and stands in no placement group of ours."""
    for template, data in _templates(assembly):
        market = data.get("InstanceMarketOptions", {}).get("MarketType")
        target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
        if market == "capacity-block" and not target.get("CapacityReservationId"):
            yield _finding("capacity.target", template, "market type capacity-block without a reservation id")
        if market == "capacity-block" and data.get("Placement", {}).get("GroupName"):
            yield _finding("capacity.placement", template, "a Capacity Block takes no placement group; EC2 places it")


def zones(assembly: Assembly) -> Iterator[Finding]:
    """Machines with EFA stand in one subnet."""
    for group in assembly.resources(_GROUP):
        specification = group.properties.get("LaunchTemplate", {})
        template = assembly.resource(assembly.target(group.place.stack, specification.get("LaunchTemplateId")))
        listed = template.properties["LaunchTemplateData"].get("NetworkInterfaces", []) if template is not None else []
        subnets = group.properties.get("VPCZoneIdentifier", [])
        if any(i.get("InterfaceType") in {"efa", "efa-only"} for i in listed) and len(subnets) != 1:
            yield _finding("zone", group, f"{len(subnets)} subnets for machines with EFA; it does not leave one zone")


def user_data(assembly: Assembly) -> Iterator[Finding]:
    """User data is in base64 and not longer than EC2 takes."""
    for template, data in _templates(assembly):
        value = data.get("UserData")
        if isinstance(value, str):
            try:
                size = len(base64.b64decode(value, validate=True))
            except binascii.Error:
                yield _finding("user_data.base64", template, "UserData is not base64; wrap it in Fn::Base64")
                continue
        elif isinstance(value, Mapping) and "Fn::Base64" in value:
            size = len(str(value["Fn::Base64"]))
        else:
            yield _finding("user_data.missing", template, "a machine without UserData does not know its role")
            continue
        if size > MAX_USER_DATA_BYTES:
            yield _finding("user_data.size", template, f"{size} bytes; EC2 takes {MAX_USER_DATA_BYTES}")


def rolling(assembly: Assembly) -> Iterator[Finding]:
    """Every group waits for its machines' signals, so that a bad image rolls back."""
    for place, body in assembly.bodies():
        if body["Type"] != _GROUP:
            continue
        update = body.get("UpdatePolicy", {}).get("AutoScalingRollingUpdate", {})
        if update.get("WaitOnResourceSignals") is not True or "CreationPolicy" not in body:
            yield Finding(
                "rolling", place, "no wait for signals: an update would succeed with machines that never work"
            )


RULES: tuple[Rule, ...] = (interfaces, public_addresses, hardening, capacity, zones, user_data, rolling)


def _templates(assembly: Assembly) -> Iterator[tuple[Resource, Mapping[str, Any]]]:
    for template in assembly.resources(_TEMPLATE):
        yield template, template.properties.get("LaunchTemplateData", {})


def _finding(rule: str, resource: Resource, message: str) -> Finding:
    return Finding(rule, resource.place, message)
