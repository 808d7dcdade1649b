"""The network stack: subnets, endpoints, flow logs, and who may speak to whom."""

from __future__ import annotations

from typing import Any

from aws_cdk import RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from constructs import Construct

from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.constructs.endpoints import CONTAINER_SERVICES, INTERFACE_SERVICES, add_endpoints
from kvduplex_infra.constructs.security import SecurityGroups
from kvduplex_infra.stacks.base import ClusterStack

__all__ = ["NetworkStack"]


class NetworkStack(ClusterStack):
    """One VPC of the cluster's own.

    Attributes:
        vpc: Private subnets in every zone; public ones only for a NAT gateway or a public load balancer.
        groups: Security groups by what they guard.
    """

    def __init__(self, scope: Construct, *, cluster: Cluster, **kwargs: Any) -> None:
        super().__init__(scope, "network", cluster=cluster, **kwargs)
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            vpc_name=cluster.name,
            ip_addresses=ec2.IpAddresses.cidr(str(cluster.network.cidr)),
            availability_zones=self.availability_zones,
            nat_gateways=1 if cluster.network.internet == "nat" else 0,
            subnet_configuration=_subnets(cluster),
        )
        self._log_flows()
        self.groups = SecurityGroups(self, "Groups", vpc=self.vpc, cluster=cluster)
        if cluster.network.endpoints:
            containers = CONTAINER_SERVICES if cluster.router.platform == "ecs" else ()
            add_endpoints(self.vpc, services=(*INTERFACE_SERVICES, *containers), group=self.groups.endpoints)

    @property
    def private_subnets(self) -> list[ec2.ISubnet]:
        """Private subnets, a zone each."""
        wants_nat = self.cluster.network.internet == "nat"
        return list(self.vpc.private_subnets if wants_nat else self.vpc.isolated_subnets)

    @property
    def engine_subnet(self) -> ec2.ISubnet:
        """The one subnet of all engines: EFA traffic does not leave a zone."""
        return next(s for s in self.private_subnets if s.availability_zone == self.cluster.zone)

    def _log_flows(self) -> None:
        group = logs.LogGroup(
            self,
            "FlowLogs",
            log_group_name=self.names.log_group("flows"),
            retention=logs.RetentionDays.ONE_MONTH,
            removal_policy=RemovalPolicy.DESTROY,
        )
        self.vpc.add_flow_log(
            "FlowLog",
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(group),
            traffic_type=ec2.FlowLogTrafficType.ALL,
        )


def _subnets(cluster: Cluster) -> list[ec2.SubnetConfiguration]:
    prefix = cluster.network.cidr.prefixlen
    has_nat = cluster.network.internet == "nat"
    kind = ec2.SubnetType.PRIVATE_WITH_EGRESS if has_nat else ec2.SubnetType.PRIVATE_ISOLATED
    # An eighth of the network a zone: at most six zones, and room for public subnets.
    subnets = [ec2.SubnetConfiguration(name="private", subnet_type=kind, cidr_mask=prefix + 3)]
    if has_nat or cluster.access.mode == "public":
        public = ec2.SubnetConfiguration(
            name="public",
            subnet_type=ec2.SubnetType.PUBLIC,
            cidr_mask=min(prefix + 6, 28),
            map_public_ip_on_launch=False,
        )
        subnets.append(public)
    return subnets
