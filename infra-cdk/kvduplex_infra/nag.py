"""cdk-nag over every stack; what it finds and we keep is acknowledged with a reason, anything else fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aws_cdk import Acknowledgment, App, Token, Validations
from cdk_nag import AwsSolutionsChecks
from constructs import IConstruct

from kvduplex_infra.build import ClusterStacks
from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.explanations import FINDINGS
from kvduplex_infra.names import Names
from kvduplex_infra.stacks.image import ImageStack

__all__ = ["acknowledge", "acknowledge_image", "guard"]

_WILDCARD = "AwsSolutions-IAM5[Resource::{}]"


def guard(app: App) -> None:
    """Let cdk-nag judge every stack of `app`."""
    Validations.of(app).add_plugins(AwsSolutionsChecks(app))


def acknowledge(stacks: ClusterStacks, cluster: Cluster) -> None:
    """Say of each finding that is kept why it is."""
    _keep(stacks.network, "CloudFormation-Validate::W3010", "zones")
    for place in (stacks.identity, stacks.state):
        if place is not None:
            _keep(place, "AwsSolutions-SMG4", "keys")
    _keep(stacks.router.door.access_logs, "AwsSolutions-S1", "log_bucket")
    given = stacks.identity.account
    account = "<AWS::AccountId>" if Token.is_unresolved(given) else given
    if stacks.router.service is not None:
        _keep_containers(stacks, cluster, account)
    for role, machines in stacks.identity.roles.items():
        for resource, kind in _wildcards(cluster, role, account):
            _keep(machines, _WILDCARD.format(resource), kind)


def _keep_containers(stacks: ClusterStacks, cluster: Cluster, account: str) -> None:
    """The same for routers in containers."""
    _keep(stacks.router, "AwsSolutions-ECS2", "node_file")
    _keep(stacks.identity.router_role, _WILDCARD.format("*"), "everything")
    logs = f"arn:<AWS::Partition>:logs:{cluster.region}:{account}:log-group:{Names(cluster.name).log_group('router')}:*"
    _keep(stacks.router, _WILDCARD.format(logs), "log_streams")
    _keep(stacks.router, _WILDCARD.format("*"), "everything")


def acknowledge_image(stack: ImageStack) -> None:
    """The same for an image stack."""
    given = stack.account
    where = f"{stack.region}:{'<AWS::AccountId>' if Token.is_unresolved(given) else given}"
    _keep(stack.role, _WILDCARD.format("*"), "everything")
    for resource in (
        "arn:<AWS::Partition>:s3:::ec2imagebuilder-*",
        f"arn:<AWS::Partition>:imagebuilder:{where}:component/{stack.stack_name.replace('-image-', '-')}-*",
        f"arn:<AWS::Partition>:logs:{where}:log-group:/aws/imagebuilder/*",
    ):
        _keep(stack.role, _WILDCARD.format(resource), "builder")


def _wildcards(cluster: Cluster, role: str, account: str) -> Iterator[tuple[str, str]]:
    """Resources with a wildcard in the policy of `role`, as cdk-nag writes them, and what explains them."""
    names = Names(cluster.name)
    where = f"{cluster.region}:{account}"
    stack = names.stack("router" if role == "router" else "engines")
    group = f"autoScalingGroup:*:autoScalingGroupName/{names.group(role)}"
    yield "*", "everything"
    yield f"arn:<AWS::Partition>:logs:{where}:log-group:{names.log_group(role)}:*", "log_streams"
    yield f"arn:<AWS::Partition>:autoscaling:{where}:{group}", "group"
    yield f"arn:<AWS::Partition>:cloudformation:{where}:stack/{stack}/*", "stack"
    if role != "router":
        yield f"arn:<AWS::Partition>:ec2:{where}:instance/*", "machines"
        for url in _sources(cluster):
            yield f"arn:<AWS::Partition>:s3:::{url.removeprefix('s3://').rstrip('/')}/*", "objects"


def _sources(cluster: Cluster) -> Iterable[str]:
    return [url for url in (cluster.served.source, cluster.compile_cache) if url is not None]


def _keep(place: IConstruct, rule: str, kind: str) -> None:
    Validations.of(place).acknowledge(Acknowledgment(id=rule, reason=FINDINGS[kind]))
