"""What the routers' containers may do on AWS."""

from __future__ import annotations

from aws_cdk import Stack
from aws_cdk import aws_iam as iam
from constructs import Construct

from kvduplex_infra.cluster.container import Container
from kvduplex_infra.names import METRIC_NAMESPACE, Names
from kvduplex_infra.policies import on_everything, statement

__all__ = ["execution_role", "task_role"]


def task_role(scope: Construct, construct_id: str, *, names: Names) -> iam.Role:
    """Role of the routers themselves: find engines, publish metrics; stacks grant secrets on it."""
    role = _assumed_by_tasks(scope, construct_id, f"Routers of {names.cluster}")
    role.add_to_policy(on_everything("FindEngines", ["ec2:DescribeInstances"]))
    role.add_to_policy(
        on_everything(
            "PublishMetrics",
            ["cloudwatch:PutMetricData"],
            {"StringEquals": {"cloudwatch:namespace": METRIC_NAMESPACE}},
        )
    )
    return role


def execution_role(scope: Construct, construct_id: str, *, names: Names, container: Container) -> iam.Role:
    """Role of the service that starts them: fetch this one image, write this one log group."""
    stack = Stack.of(scope)
    role = _assumed_by_tasks(scope, construct_id, f"Start of routers of {names.cluster}")
    logs = f"arn:PARTITION:logs:REGION:ACCOUNT:log-group:{names.log_group('router')}:*"
    role.add_to_policy(statement(stack, "WriteLogs", ["logs:CreateLogStream", "logs:PutLogEvents"], [logs]))
    if container.repository_arn is not None:
        pull = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
        role.add_to_policy(statement(stack, "PullImage", pull, [container.repository_arn]))
        role.add_to_policy(on_everything("RegistryLogin", ["ecr:GetAuthorizationToken"]))
    return role


def _assumed_by_tasks(scope: Construct, construct_id: str, description: str) -> iam.Role:
    own = {"StringEquals": {"aws:SourceAccount": Stack.of(scope).account}}
    principal = iam.ServicePrincipal("ecs-tasks.amazonaws.com", conditions=own)
    return iam.Role(scope, construct_id, assumed_by=principal, description=description)
