"""The RunInstances request of every machine of a cluster. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvduplex.ec2.request import LaunchRequest
from kvduplex.node.config import NodeRole
from kvduplex.node.discovery import CLUSTER_TAG, HTTP_PORT_TAG, LEASE_PORT_TAG, REPLICA_ROLE, ROLE_TAG
from kvduplex.node.engine import LOOPBACK, engine_plan_of
from kvduplex.node.user_data import render_user_data
from kvduplex_transfer.hostchecks.efa_layout import InterfaceType, network_interfaces
from kvduplex_transfer.interface import Role

__all__ = ["INDEX_TAG", "SPEC_TAG", "Machine", "Place", "machines", "resource_name"]

INDEX_TAG = "kvduplex:index"
SPEC_TAG = "kvduplex:spec"
"""Digest of all that a machine was started with, so that a changed request is noticed."""


@dataclass(frozen=True, slots=True)
class Place:
    """What preflight found out about where the cluster goes.

    Attributes:
        ami: Image id.
        root_device: Name of its root volume.
        groups: Security groups of every interface.
        placement_group: Group of the engines, or None.
    """

    ami: str
    root_device: str
    groups: tuple[str, ...]
    placement_group: str | None


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine to run.

    Attributes:
        role: What it does.
        index: Which of its role, from 0.
        name: Role as its tags say it, and index, e.g. ``decode-0``.
        instance_type: EC2 type.
        spec: Digest of what it is started with.
        parameters: Arguments of ``run_instances``.
    """

    role: NodeRole
    index: int
    name: str
    instance_type: str
    spec: str
    parameters: Mapping[str, Any]


def resource_name(cluster: str) -> str:
    """Name of the cluster's security group and placement group."""
    return f"kvduplex-{cluster}"


def machines(request: LaunchRequest, place: Place) -> tuple[Machine, ...]:
    """Every machine of the cluster, engines first.

    Raises:
        NodeConfigError: The recipe and the options do not go together.
    """
    return tuple(
        _machine(request, place, role, index) for role, fleet in request.fleets.items() for index in range(fleet.count)
    )


def _machine(request: LaunchRequest, place: Place, role: NodeRole, index: int) -> Machine:
    instance_type = request.fleets[role].instance_type
    parameters = _parameters(request, place, role, instance_type)
    # Without the id of the cluster's own group, which is not known before it is made.
    asked = _parameters(request, replace(place, groups=request.security_groups), role, instance_type)
    spec = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    label = REPLICA_ROLE if request.replicas and role is not NodeRole.ROUTER else role.value
    tags = {
        "Name": f"{resource_name(request.cluster)}-{label}-{index}",
        CLUSTER_TAG: request.cluster,
        ROLE_TAG: label,
        INDEX_TAG: str(index),
        SPEC_TAG: spec,
        **_port_tags(request, role),
    }
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    specifications = [{"ResourceType": kind, "Tags": listed} for kind in ("instance", "volume", "network-interface")]
    parameters["TagSpecifications"] = specifications
    return Machine(role, index, f"{label}-{index}", instance_type, spec, parameters)


def _parameters(request: LaunchRequest, place: Place, role: NodeRole, instance_type: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "ImageId": place.ami,
        "InstanceType": instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        "IamInstanceProfile": {"Name": request.instance_profile},
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "NetworkInterfaces": _interfaces(request, place, role, instance_type),
        "BlockDeviceMappings": [_volume(request, place, role)],
        "UserData": render_user_data(request.node(role)),
    }
    if role is NodeRole.ROUTER:
        return parameters
    if place.placement_group is not None:
        parameters["Placement"] = {"GroupName": place.placement_group}
    if request.reservation is not None:
        target = {"CapacityReservationId": request.reservation}
        parameters["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    if request.capacity_block:
        parameters["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    return parameters


def _interfaces(request: LaunchRequest, place: Place, role: NodeRole, instance_type: str) -> list[dict[str, Any]]:
    # A router needs no EFA, even on a type that has it.
    layout = network_interfaces(instance_type, request.efa_layout)
    wanted = [layout[0]] if role is NodeRole.ROUTER else list(layout)
    return [
        {
            "NetworkCardIndex": interface.card,
            "DeviceIndex": interface.device,
            "SubnetId": request.subnet,
            "Groups": list(place.groups),
            "DeleteOnTermination": True,
            "InterfaceType": InterfaceType.INTERFACE.value if role is NodeRole.ROUTER else interface.type.value,
        }
        for interface in wanted
    ]


def _volume(request: LaunchRequest, place: Place, role: NodeRole) -> dict[str, Any]:
    size = 50 if role is NodeRole.ROUTER else request.volume_gib
    ebs = {"VolumeSize": size, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    return {"DeviceName": place.root_device, "Ebs": ebs}


def _port_tags(request: LaunchRequest, role: NodeRole) -> dict[str, str]:
    """Where the router finds an engine: read from the engine's own plan, so that the two cannot differ."""
    if role is NodeRole.ROUTER:
        return {}
    plan = engine_plan_of(request.node(role), Role(role.value), address=LOOPBACK, interpreter="python")
    return {HTTP_PORT_TAG: str(plan.ports["http"]), LEASE_PORT_TAG: str(plan.ports.get("lease", 0))}
