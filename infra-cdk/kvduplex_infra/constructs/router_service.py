"""Routers as containers on Fargate, behind the same load balancer as machines would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aws_cdk import Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elbv2
from aws_cdk import aws_iam as iam
from constructs import Construct

from kvduplex.node.config import NODE_VARIABLE
from kvduplex_infra.cluster.container import Container
from kvduplex_infra.constructs.balancer import Balancer
from kvduplex_infra.names import ROUTER_PORT, Names

__all__ = ["RouterService"]

_PLATFORM = "1.4.0"
_STOP_TIMEOUT_S = 120
"""The longest that Fargate waits between SIGTERM and SIGKILL; turns have ended before, while targets deregister."""
_GRACE_S = 900
_FILES = 65_536
_WRITABLE = {"run": "/run/kvduplex", "log": "/var/log/kvduplex", "tmp": "/tmp"}  # noqa: S108 - a volume of its own
_ROUTER = "router"
_Task = ecs.CfnTaskDefinition
_Service = ecs.CfnService


class RouterService(Construct):
    """A service of `count` routers over the zones of its subnets.

    Attributes:
        service: The service.
        task: Its task definition.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        names: Names,
        container: Container,
        node: str,
        count: int,
        subnets: Sequence[str],
        group: str,
        door: Balancer,
        task_role: iam.IRole,
        execution_role: iam.IRole,
    ) -> None:
        super().__init__(scope, construct_id)
        self._names = names
        self._container = container
        self._node = node
        self.task = self._definition(task_role, execution_role)
        cluster = ecs.CfnCluster(
            self,
            "Cluster",
            cluster_name=names.group("router"),
            cluster_settings=[ecs.CfnCluster.ClusterSettingsProperty(name="containerInsights", value="enabled")],
        )
        self.service = self._run(cluster, count=count, subnets=subnets, group=group, targets=door.targets)
        # A target group takes targets only once a listener uses it.
        self.service.node.add_dependency(door.listener)

    def _definition(self, task_role: iam.IRole, execution_role: iam.IRole) -> ecs.CfnTaskDefinition:
        return _Task(
            self,
            "Task",
            family=self._names.group("router"),
            cpu=str(self._container.vcpus * 1024),
            memory=str(self._container.memory_gib * 1024),
            network_mode="awsvpc",
            requires_compatibilities=["FARGATE"],
            runtime_platform=_Task.RuntimePlatformProperty(cpu_architecture="X86_64", operating_system_family="LINUX"),
            task_role_arn=task_role.role_arn,
            execution_role_arn=execution_role.role_arn,
            volumes=[_Task.VolumeProperty(name=name) for name in _WRITABLE],
            container_definitions=[self._router(), self._metrics()],
        )

    def _router(self) -> ecs.CfnTaskDefinition.ContainerDefinitionProperty:
        return _Task.ContainerDefinitionProperty(
            **self._common(),
            name=_ROUTER,
            essential=True,
            stop_timeout=_STOP_TIMEOUT_S,
            port_mappings=[_Task.PortMappingProperty(container_port=ROUTER_PORT, protocol="tcp")],
            ulimits=[_Task.UlimitProperty(name="nofile", soft_limit=_FILES, hard_limit=_FILES)],
            mount_points=[
                _Task.MountPointProperty(source_volume=name, container_path=path) for name, path in _WRITABLE.items()
            ],
        )

    def _metrics(self) -> ecs.CfnTaskDefinition.ContainerDefinitionProperty:
        """Publishes what the router counts; turns go on without it, so it may be started anew."""
        return _Task.ContainerDefinitionProperty(
            **self._common(),
            name="metrics",
            essential=False,
            entry_point=["python", "-m", "kvduplex.aws", "--metrics-only"],
            depends_on=[_Task.ContainerDependencyProperty(container_name=_ROUTER, condition="START")],
            restart_policy=_Task.RestartPolicyProperty(enabled=True, restart_attempt_period=60),
        )

    def _common(self) -> dict[str, Any]:
        return {
            "image": self._container.image,
            "environment": [_Task.KeyValuePairProperty(name=NODE_VARIABLE, value=self._node)],
            "readonly_root_filesystem": True,
            "linux_parameters": _Task.LinuxParametersProperty(
                capabilities=_Task.KernelCapabilitiesProperty(drop=["ALL"]), init_process_enabled=True
            ),
            "log_configuration": _Task.LogConfigurationProperty(
                log_driver="awslogs",
                options={
                    "awslogs-group": self._names.log_group("router"),
                    "awslogs-region": Stack.of(self).region,
                    "awslogs-stream-prefix": "ecs",
                },
            ),
        }

    def _run(
        self,
        cluster: ecs.CfnCluster,
        *,
        count: int,
        subnets: Sequence[str],
        group: str,
        targets: elbv2.ApplicationTargetGroup,
    ) -> ecs.CfnService:
        return _Service(
            self,
            "Service",
            service_name=self._names.group("router"),
            cluster=cluster.ref,
            task_definition=self.task.ref,
            desired_count=count,
            launch_type="FARGATE",
            platform_version=_PLATFORM,
            availability_zone_rebalancing="ENABLED",
            health_check_grace_period_seconds=_GRACE_S,
            propagate_tags="SERVICE",
            enable_execute_command=False,
            network_configuration=_Service.NetworkConfigurationProperty(
                awsvpc_configuration=_Service.AwsVpcConfigurationProperty(
                    subnets=list(subnets), security_groups=[group], assign_public_ip="DISABLED"
                )
            ),
            load_balancers=[
                _Service.LoadBalancerProperty(
                    container_name=_ROUTER, container_port=ROUTER_PORT, target_group_arn=targets.target_group_arn
                )
            ],
            # New routers serve before old ones go, and one that does not start brings the old ones back.
            deployment_configuration=_Service.DeploymentConfigurationProperty(
                minimum_healthy_percent=100,
                maximum_percent=200,
                deployment_circuit_breaker=_Service.DeploymentCircuitBreakerProperty(enable=True, rollback=True),
            ),
        )
