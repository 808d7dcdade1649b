"""Routers in containers: the same door, keys, engines and logs as routers on machines, and less than those may do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvduplex.node.document import load_node
from kvduplex_infra.checks import Assembly, inspect

pytestmark = pytest.mark.infra
IMAGE = "123456789012.dkr.ecr.us-east-2.amazonaws.com/kvduplex-router@sha256:" + "0" * 64
REPOSITORY = ":ecr:us-east-2:123456789012:repository/kvduplex-router"
Properties = Mapping[str, Any]


@pytest.fixture
def trn2(assembly: Callable[..., Assembly]) -> Assembly:
    return assembly("trn2", router={"platform": "ecs", "count": 2, "container": {"image": IMAGE}})


def one(templates: Assembly, kind: str) -> Properties:
    (resource,) = templates.resources(kind)
    return resource.properties


def containers(templates: Assembly) -> dict[str, Properties]:
    listed = one(templates, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
    return {container["Name"]: container for container in listed}


def plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "".join(part if isinstance(part, str) else "<ref>" for part in value["Fn::Join"][1])


def statements_of(templates: Assembly, role: Any, stack: str) -> dict[str, Properties]:
    """Statements of a role's policies by their id, or by their first action."""
    place = templates.target(stack, role)
    found = {}
    for policy in templates.resources("AWS::IAM::Policy"):
        roles = [templates.target(policy.place.stack, reference) for reference in policy.properties["Roles"]]
        if place in roles:
            for statement in policy.properties["PolicyDocument"]["Statement"]:
                found[statement.get("Sid") or statement["Action"][0]] = statement
    return found


def test_nothing_of_router_machines_is_left_and_the_validator_finds_nothing(trn2: Assembly) -> None:
    assert inspect(trn2) == []
    groups = {group.place.logical_id for group in trn2.resources("AWS::AutoScaling::AutoScalingGroup")}
    assert groups == {"PrefillGroup", "DecodeGroup"}
    parameters = {parameter.properties["Name"] for parameter in trn2.resources("AWS::SSM::Parameter")}
    assert not [name for name in parameters if name.endswith("/router")]


def test_routers_stand_in_two_zones_behind_the_door_and_no_address_is_public(trn2: Assembly) -> None:
    service = one(trn2, "AWS::ECS::Service")
    network = service["NetworkConfiguration"]["AwsvpcConfiguration"]
    subnets = [trn2.resource(trn2.target("kvduplex-trn2-router", subnet)) for subnet in network["Subnets"]]
    zones = {subnet.properties["AvailabilityZone"] for subnet in subnets if subnet is not None}
    assert len(zones) >= 2
    assert network["AssignPublicIp"] == "DISABLED"
    (group,) = (trn2.target("kvduplex-trn2-router", group) for group in network["SecurityGroups"])
    found = trn2.resource(group)
    assert found is not None
    assert found.properties["GroupDescription"] == "Routers"
    targets = one(trn2, "AWS::ElasticLoadBalancingV2::TargetGroup")
    assert (targets["TargetType"], targets["Port"], targets["HealthCheckPath"]) == ("ip", 8000, "/health")
    (balanced,) = service["LoadBalancers"]
    assert (balanced["ContainerName"], balanced["ContainerPort"]) == ("router", 8000)


def test_a_deployment_that_fails_goes_back_and_no_router_goes_before_another_serves(trn2: Assembly) -> None:
    service = one(trn2, "AWS::ECS::Service")
    deployment = service["DeploymentConfiguration"]
    assert deployment["DeploymentCircuitBreaker"] == {"Enable": True, "Rollback": True}
    assert (deployment["MinimumHealthyPercent"], deployment["MaximumPercent"]) == (100, 200)
    assert service["DesiredCount"] == 2
    assert service["EnableExecuteCommand"] is False


def test_the_router_is_told_what_a_machine_would_be_and_holds_no_secret(trn2: Assembly) -> None:
    router = containers(trn2)["router"]
    (variable,) = router["Environment"]
    assert variable["Name"] == "KVDUPLEX_NODE"
    text = plain(variable["Value"]).replace("<ref>:<ref>", "store.local:6379").replace("<ref>", "secret")
    node = load_node(text)
    assert node.discovery.ec2_tags == {"kvduplex:cluster": "kvduplex-trn2"}
    assert node.keys.clients is not None
    assert node.keys.engines is not None
    assert node.state.url == "valkeys://kvduplex-router@store.local:6379"
    assert node.logging.relay
    assert node.launch is None
    assert node.drain.timeout_s == 600
    references = [part for part in variable["Value"]["Fn::Join"][1] if not isinstance(part, str)]
    pointed = {trn2.target("kvduplex-trn2-router", reference) for reference in references}
    kinds = {found.type for found in map(trn2.resource, pointed) if found is not None}
    assert kinds == {"AWS::SecretsManager::Secret", "AWS::ElastiCache::ServerlessCache"}


def test_containers_are_one_image_by_digest_read_only_and_without_capabilities(trn2: Assembly) -> None:
    both = containers(trn2)
    assert set(both) == {"router", "metrics"}
    for container in both.values():
        assert container["Image"] == IMAGE
        assert container["ReadonlyRootFilesystem"] is True
        assert container["LinuxParameters"]["Capabilities"] == {"Drop": ["ALL"]}
        options = container["LogConfiguration"]["Options"]
        assert options["awslogs-group"] == "/kvduplex/kvduplex-trn2/router"
    writable = {mount["ContainerPath"] for mount in both["router"]["MountPoints"]}
    assert writable == {"/run/kvduplex", "/var/log/kvduplex", "/tmp"}  # noqa: S108
    groups = {group.properties["LogGroupName"] for group in trn2.resources("AWS::Logs::LogGroup")}
    assert "/kvduplex/kvduplex-trn2/router" in groups


def test_metrics_are_published_beside_the_router_and_may_fail(trn2: Assembly) -> None:
    metrics = containers(trn2)["metrics"]
    assert metrics["EntryPoint"] == ["python", "-m", "kvduplex.aws", "--metrics-only"]
    assert metrics["Essential"] is False
    assert metrics["RestartPolicy"]["Enabled"] is True


def test_the_routers_role_finds_engines_publishes_and_reads_its_secrets(trn2: Assembly) -> None:
    task = one(trn2, "AWS::ECS::TaskDefinition")
    found = statements_of(trn2, task["TaskRoleArn"], "kvduplex-trn2-router")
    assert set(found) == {"FindEngines", "PublishMetrics", "secretsmanager:DescribeSecret"}
    assert found["PublishMetrics"]["Condition"] == {"StringEquals": {"cloudwatch:namespace": "kvduplex"}}
    secrets = found["secretsmanager:DescribeSecret"]
    assert set(secrets["Action"]) == {"secretsmanager:DescribeSecret", "secretsmanager:GetSecretValue"}
    assert len(secrets["Resource"]) == 3  # of clients, of engines, of the store


def test_the_starting_role_pulls_one_image_and_writes_one_log(trn2: Assembly) -> None:
    task = one(trn2, "AWS::ECS::TaskDefinition")
    found = statements_of(trn2, task["ExecutionRoleArn"], "kvduplex-trn2-router")
    assert set(found) == {"WriteLogs", "PullImage", "RegistryLogin"}
    assert plain(found["PullImage"]["Resource"]).endswith(REPOSITORY)
    assert re.search(r"log-group:/kvduplex/kvduplex-trn2/router:\*$", plain(found["WriteLogs"]["Resource"]))
    assert found["RegistryLogin"]["Action"] == "ecr:GetAuthorizationToken"
    for role in trn2.resources("AWS::IAM::Role"):
        (trust,) = role.properties["AssumeRolePolicyDocument"]["Statement"]
        if "ecs-tasks" in str(trust["Principal"]):
            assert trust["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}


def test_containers_are_pulled_without_the_internet(trn2: Assembly) -> None:
    services = {plain(e.properties["ServiceName"]).split(".", 3)[-1] for e in trn2.resources("AWS::EC2::VPCEndpoint")}
    assert {"ecr.api", "ecr.dkr"} <= services
    assert not list(trn2.resources("AWS::EC2::InternetGateway"))
