"""The engines stack: one fleet a role, side by side in one subnet and one placement group."""

from __future__ import annotations

from typing import Any

from aws_cdk import RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from kvduplex.node.discovery import DP_SIZE_TAG, HTTP_PORT_TAG, LEASE_PORT_TAG, REPLICA_ROLE
from kvduplex_infra import agent
from kvduplex_infra.cluster.capacity import OnDemand
from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.cluster.model import Fleet as FleetFile
from kvduplex_infra.constructs.fleet import Fleet
from kvduplex_infra.constructs.launch_template import launch_template
from kvduplex_infra.constructs.machine_image import image_reference
from kvduplex_infra.node_files import ENGINE_KEY, engine_node, engine_plan, user_data
from kvduplex_infra.stacks.base import ClusterStack
from kvduplex_infra.stacks.identity import IdentityStack
from kvduplex_infra.stacks.network import NetworkStack
from kvduplex_transfer.hostchecks.efa_layout import NetworkInterface, network_interfaces

__all__ = ["EnginesStack"]


class EnginesStack(ClusterStack):
    """Prefill and decode fleets.

    Attributes:
        fleets: By role.
    """

    def __init__(
        self, scope: Construct, *, cluster: Cluster, network: NetworkStack, identity: IdentityStack, **kwargs: Any
    ) -> None:
        super().__init__(scope, "engines", cluster=cluster, **kwargs)
        self._network = network
        self._identity = identity
        self._own_placement: ec2.CfnPlacementGroup | None = None
        self.fleets = {role: self._fleet(role, fleet) for role, fleet in cluster.fleets.items()}

    def _fleet(self, role: str, fleet: FleetFile) -> Fleet:
        self._prepare_logs(role)
        return Fleet(
            self,
            role.capitalize(),
            names=self.names,
            role=role,
            template=self._template(role, fleet),
            subnets=[self._network.engine_subnet.subnet_id],
            count=fleet.count,
            start_timeout_s=fleet.start_timeout_s,
            drain_timeout_s=self.cluster.drain.timeout_s,
            topic_arn=self._identity.operators.topic_arn,
            capacity=fleet.capacity,
        )

    def _template(self, role: str, fleet: FleetFile) -> ec2.CfnLaunchTemplate:
        groups = self._network.groups
        node = engine_node(self.cluster, role, fleet, self.names)
        plan = engine_plan(node, role)
        return launch_template(
            self,
            f"{role.capitalize()}Template",
            image_id=image_reference(self.cluster.image, region=self.region),
            instance_type=fleet.instance_type,
            profile_arn=self._identity.roles[role].profile.attr_arn,
            user_data=user_data(node, {ENGINE_KEY: self._identity.engine_key.secret_arn}),
            interfaces=_interfaces(fleet),
            primary_groups=[groups.fabric.security_group_id, groups.engine.security_group_id],
            other_groups=[groups.fabric.security_group_id],
            volume_gib=fleet.volume_gib,
            volume_mibps=fleet.volume_mibps,
            tags={
                **self.names.tags(REPLICA_ROLE if self.cluster.replicas else role),
                HTTP_PORT_TAG: str(plan.ports["http"]),
                LEASE_PORT_TAG: str(plan.ports.get("lease", 0)),
                **({DP_SIZE_TAG: str(plan.ranks)} if plan.ranks > 1 else {}),
            },
            capacity=fleet.capacity,
            placement_group=self._placement(fleet),
        )

    def _placement(self, fleet: FleetFile) -> str | None:
        """Name of the group that a fleet's machines stand in.

        A Capacity Block places its machines itself, and EC2 matches a reservation only in the group it was made in.
        """
        if not isinstance(fleet.capacity, OnDemand):
            return getattr(fleet.capacity, "placement_group", None)
        if len(_interfaces(fleet)) == 1:
            return None
        if self._own_placement is None:
            self._own_placement = ec2.CfnPlacementGroup(self, "Placement", strategy="cluster")
        return self._own_placement.ref

    def _prepare_logs(self, role: str) -> None:
        logs.LogGroup(
            self,
            f"{role.capitalize()}Logs",
            log_group_name=self.names.log_group(role),
            retention=logs.RetentionDays.ONE_MONTH,
            removal_policy=RemovalPolicy.DESTROY,
        )
        ssm.StringParameter(
            self,
            f"{role.capitalize()}Agent",
            parameter_name=self.names.agent_parameter(role),
            description=f"CloudWatch agent of {self.cluster.name}: {role}",
            string_value=agent.configuration(self.cluster.backend, self.names, role),
        )


def _interfaces(fleet: FleetFile) -> tuple[NetworkInterface, ...]:
    if fleet.efa_interfaces == 0:
        return network_interfaces("c7i.large")
    interfaces = network_interfaces(fleet.instance_type, fleet.efa_layout)
    if fleet.efa_interfaces is None:
        return interfaces
    cards = range(fleet.efa_interfaces)
    return tuple(interface for interface in interfaces if interface.card in cards)
