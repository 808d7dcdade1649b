"""The router stack: routers in several zones behind one load balancer, on machines or in containers."""

from __future__ import annotations

from typing import Any

from aws_cdk import CfnOutput, RemovalPolicy
from aws_cdk import aws_elasticloadbalancingv2 as elbv2
from aws_cdk import aws_logs as logs
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from kvduplex_infra import agent
from kvduplex_infra.cluster.capacity import OnDemand
from kvduplex_infra.cluster.container import Container
from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.constructs.balancer import Balancer
from kvduplex_infra.constructs.fleet import Fleet
from kvduplex_infra.constructs.launch_template import launch_template
from kvduplex_infra.constructs.machine_image import image_reference
from kvduplex_infra.constructs.router_service import RouterService
from kvduplex_infra.constructs.task_role import execution_role
from kvduplex_infra.node_files import (
    CLIENT_KEYS,
    ENGINE_KEY,
    STATE_ENDPOINT,
    STATE_PASSWORD,
    container_node,
    router_node,
    user_data,
)
from kvduplex_infra.stacks.base import ClusterStack
from kvduplex_infra.stacks.identity import IdentityStack
from kvduplex_infra.stacks.network import NetworkStack
from kvduplex_infra.stacks.state import StateStack
from kvduplex_transfer.hostchecks.efa_layout import network_interfaces

__all__ = ["RouterStack"]

_START_TIMEOUT_S = 900
_VOLUME_GIB = 60
_VOLUME_MIBPS = 125


class RouterStack(ClusterStack):
    """Routers and their front door.

    Attributes:
        fleet: The machines, or None with containers.
        service: The containers, or None with machines.
        door: The load balancer.
    """

    def __init__(
        self,
        scope: Construct,
        *,
        cluster: Cluster,
        network: NetworkStack,
        identity: IdentityStack,
        state: StateStack | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, "router", cluster=cluster, **kwargs)
        self._network = network
        self._identity = identity
        self._state = state
        container = cluster.router.container
        if state is not None:
            state.password.grant_read(identity.router_role)
        self.door = Balancer(
            self,
            "Door",
            vpc=network.vpc,
            private_subnets=network.private_subnets,
            group=network.groups.balancer,
            access=cluster.access,
            drain_timeout_s=cluster.drain.timeout_s,
            target_type=elbv2.TargetType.INSTANCE if container is None else elbv2.TargetType.IP,
        )
        self._prepare_logs()
        self.fleet = self._fleet() if container is None else None
        self.service = None if container is None else self._service(container)
        scheme = "https" if cluster.access.certificate_arn else "http"
        CfnOutput(self, "Url", value=f"{scheme}://{self.door.balancer.load_balancer_dns_name}/v1")

    def _service(self, container: Container) -> RouterService:
        return RouterService(
            self,
            "Service",
            names=self.names,
            container=container,
            node=container_node(router_node(self.cluster, self.names), self._replacements()),
            count=self.cluster.router.count,
            subnets=[subnet.subnet_id for subnet in self._network.private_subnets],
            group=self._network.groups.router.security_group_id,
            door=self.door,
            task_role=self._identity.router_role,
            execution_role=execution_role(self, "Start", names=self.names, container=container),
        )

    def _fleet(self) -> Fleet:
        self._configure_agent()
        cluster = self.cluster
        template = launch_template(
            self,
            "RouterTemplate",
            image_id=image_reference(cluster.router_image, region=self.region),
            instance_type=cluster.router.instance_type,
            profile_arn=self._identity.roles["router"].profile.attr_arn,
            user_data=user_data(router_node(cluster, self.names), self._replacements()),
            interfaces=network_interfaces(cluster.router.instance_type)[:1],
            primary_groups=[self._network.groups.router.security_group_id],
            other_groups=[],
            volume_gib=_VOLUME_GIB,
            volume_mibps=_VOLUME_MIBPS,
            tags=self.names.tags("router"),
            capacity=OnDemand(),
            placement_group=None,
        )
        return Fleet(
            self,
            "Router",
            names=self.names,
            role="router",
            template=template,
            subnets=[subnet.subnet_id for subnet in self._network.private_subnets],
            count=cluster.router.count,
            start_timeout_s=_START_TIMEOUT_S,
            drain_timeout_s=cluster.drain.timeout_s,
            topic_arn=self._identity.operators.topic_arn,
            capacity=OnDemand(),
            target_groups=[self.door.targets.target_group_arn],
        )

    def _replacements(self) -> dict[str, str]:
        replacements = {
            CLIENT_KEYS: self._identity.client_keys.secret_arn,
            ENGINE_KEY: self._identity.engine_key.secret_arn,
        }
        if self._state is not None:
            replacements |= {STATE_ENDPOINT: self._state.endpoint, STATE_PASSWORD: self._state.password.secret_arn}
        return replacements

    def _prepare_logs(self) -> None:
        logs.LogGroup(
            self,
            "Logs",
            log_group_name=self.names.log_group("router"),
            retention=logs.RetentionDays.ONE_MONTH,
            removal_policy=RemovalPolicy.DESTROY,
        )

    def _configure_agent(self) -> None:
        ssm.StringParameter(
            self,
            "Agent",
            parameter_name=self.names.agent_parameter("router"),
            description=f"CloudWatch agent of {self.cluster.name}: router",
            string_value=agent.configuration(None, self.names, "router"),
        )
