"""Security groups: nobody speaks to a machine but those that must."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from kvduplex_infra import names as ports
from kvduplex_infra.cluster.model import Cluster
from kvduplex_transfer.host.options import HTTP_PORTS, LEASE_PORTS
from kvduplex_transfer.interface import Role

__all__ = ["SecurityGroups"]

HTTPS = 443
HTTP = 80
VALKEY_PORT = 6379


class SecurityGroups(Construct):
    """All groups of a cluster.

    Attributes:
        fabric: Engines among themselves: everything, in and out, and nothing from anyone else. EFA asks for exactly
            this; engines without EFA use it for NIXL over TCP, whose ports are not fixed.
        engine: Engines towards routers and AWS services.
        router: Routers.
        balancer: The load balancer.
        state: The store of conversations.
        endpoints: Endpoints of AWS services.
    """

    def __init__(self, scope: Construct, construct_id: str, *, vpc: ec2.IVpc, cluster: Cluster) -> None:
        super().__init__(scope, construct_id)
        self._vpc = vpc
        self._cluster = cluster
        self.fabric = self._group("Fabric", "Engines among themselves: EFA and NIXL")
        self.engine = self._group("Engine", "Engines towards routers and AWS services")
        self.router = self._group("Router", "Routers")
        self.balancer = self._group("Balancer", "The load balancer")
        self.state = self._group("State", "The store of conversations")
        self.endpoints = self._group("Endpoints", "Endpoints of AWS services")
        self._let_engines_speak()
        self._let_routers_speak()
        self._let_clients_in()

    def _group(self, name: str, description: str) -> ec2.SecurityGroup:
        # Outbound rules are written out: with allow_all_outbound CDK drops the self-egress that EFA needs.
        return ec2.SecurityGroup(self, name, vpc=self._vpc, description=description, allow_all_outbound=False)

    def _let_engines_speak(self) -> None:
        self.fabric.add_ingress_rule(self.fabric, ec2.Port.all_traffic(), "EFA and NIXL between engines")
        self.fabric.add_egress_rule(self.fabric, ec2.Port.all_traffic(), "EFA and NIXL between engines")
        self._let_reach_services(self.engine)

    def _let_routers_speak(self) -> None:
        self._let_reach_services(self.router)
        for first, what in (
            (HTTP_PORTS[Role.PREFILL], "prefill engines"),
            (HTTP_PORTS[Role.DECODE], "decode engines"),
            (LEASE_PORTS[Role.DECODE], "leases"),
            (ports.EVENTS_PORT, "KV events"),
        ):
            port = ec2.Port.tcp_range(first, first + ports.ENGINES_PER_MACHINE - 1)
            self._let(self.router, self.engine, port, f"Routers to {what}")
        self._let(self.router, self.state, ec2.Port.tcp_range(VALKEY_PORT, VALKEY_PORT + 1), "Routers to the store")

    def _let_clients_in(self) -> None:
        access = self._cluster.access
        port = ec2.Port.tcp(HTTPS if access.certificate_arn else HTTP)
        for cidr in access.allowed_cidrs or (self._cluster.network.cidr,):
            self.balancer.add_ingress_rule(ec2.Peer.ipv4(str(cidr)), port, "Clients")
        self._let(self.balancer, self.router, ec2.Port.tcp(ports.ROUTER_PORT), "Load balancer to routers")

    def _let_reach_services(self, group: ec2.SecurityGroup) -> None:
        # By port and not by address: S3's gateway has public addresses, and routes decide what is reached at all.
        group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(HTTPS), "AWS services, and the hub where allowed")
        self.endpoints.add_ingress_rule(group, ec2.Port.tcp(HTTPS), "Machines to AWS services")

    def _let(self, source: ec2.SecurityGroup, target: ec2.SecurityGroup, port: ec2.Port, why: str) -> None:
        source.add_egress_rule(target, port, why)
        target.add_ingress_rule(source, port, why)
