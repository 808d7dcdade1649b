"""`cdk bootstrap` and `cdk deploy` of whole clusters, first creation and then an update, against an AWS in memory."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from kvduplex.node.document import load_node

pytestmark = [pytest.mark.infra, pytest.mark.timeout(300)]
HERE = Path(__file__).parent
CDK = Path(__file__).parents[3] / ".cache" / "cdk" / "node_modules" / ".bin" / "cdk"
ACCOUNT, REGION = "123456789012", "us-east-2"
READY_TIMEOUT_S, COMMAND_TIMEOUT_S = 60, 200


class Aws:
    """The server, and what speaks to it."""

    def __init__(self, port: int) -> None:
        # By name: buckets are looked up as BUCKET.localhost, which an address would not resolve.
        self.endpoint = f"http://localhost:{port}"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))} | {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "CDK_DISABLE_CLI_TELEMETRY": "true",
            "CDK_DISABLE_VERSION_CHECK": "1",
            "CI": "1",
            "NODE_NO_WARNINGS": "1",
        }

    def cdk(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(CDK), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout + done.stderr

    def deploy(self, output: Path) -> str:
        # Change sets of updates are not in moto; the templates are the same.
        return self.cdk("deploy", "--all", "--app", str(output), "--method=direct", "--require-approval", "never")

    def client(self, service: str) -> Any:
        make: Callable[..., Any] = boto3.client  # by a name that is not literal, which its overloads do not take
        return make(
            service,
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    assert CDK.exists(), "the CDK's command line is not installed; run `make setup-infra`"
    port = free_port()
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, str(HERE / "moto_aws.py"), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with server:
            watchdog = threading.Timer(READY_TIMEOUT_S, server.kill)
            watchdog.start()
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == "ready\n", log.read_text()[-2000:]
                watchdog.cancel()
                started = Aws(port)
                started.cdk("bootstrap", f"aws://{ACCOUNT}/{REGION}")
                yield started
            finally:
                watchdog.cancel()
                server.kill()


def groups(aws: Aws) -> dict[str, Any]:
    found = aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    return {group["AutoScalingGroupName"]: group for group in found}


def stacks(aws: Aws, cluster: str) -> dict[str, str]:
    found = aws.client("cloudformation").describe_stacks()["Stacks"]
    return {s["StackName"].removeprefix(f"{cluster}-"): s["StackStatus"] for s in found if cluster in s["StackName"]}


def launch_data(aws: Aws, group: Any) -> Any:
    """What a group's machines are launched with."""
    wanted = group["LaunchTemplate"]["LaunchTemplateId"]
    found = aws.client("ec2").describe_launch_template_versions(LaunchTemplateId=wanted)
    (version,) = found["LaunchTemplateVersions"]
    return version["LaunchTemplateData"]


def node_file(data: Any) -> str:
    """The node file in a launch template's user data."""
    content: str = yaml.safe_load(base64.b64decode(data["UserData"]))["write_files"][0]["content"]
    return content


PARTS = {"network", "identity", "state", "engines", "router", "observability"}


def test_trn2_is_created_with_its_efa_and_then_scaled(aws: Aws, synth: Callable[..., Path]) -> None:
    aws.deploy(synth("trn2"))
    assert stacks(aws, "kvduplex-trn2") == dict.fromkeys(PARTS, "CREATE_COMPLETE")
    created = groups(aws)
    assert {n: g["DesiredCapacity"] for n, g in created.items() if "trn2" in n} == {
        "kvduplex-trn2-prefill": 1,
        "kvduplex-trn2-decode": 1,
        "kvduplex-trn2-router": 2,
    }
    data = launch_data(aws, created["kvduplex-trn2-decode"])
    assert [i.get("InterfaceType") for i in data["NetworkInterfaces"]].count("efa-only") == 16
    secret = yaml.safe_load(node_file(data))["keys"]["engines"]["secret"]
    assert len(aws.client("secretsmanager").get_secret_value(SecretId=secret)["SecretString"]) == 48

    routers = node_file(launch_data(aws, created["kvduplex-trn2-router"]))
    state = yaml.safe_load(routers)["state"]
    assert state["url"] == "valkeys://kvduplex-router@valkey.local:6379"
    password = aws.client("secretsmanager").get_secret_value(SecretId=state["password"]["secret"])["SecretString"]
    assert len(password) == 64
    assert password not in routers

    aws.deploy(synth("trn2", decode={"instance_type": "trn2.48xlarge", "count": 3}))
    assert stacks(aws, "kvduplex-trn2")["engines"] == "UPDATE_COMPLETE"
    assert groups(aws)["kvduplex-trn2-decode"]["DesiredCapacity"] == 3


def test_cpu_smoke_is_created_behind_an_internal_door_and_then_updated(aws: Aws, synth: Callable[..., Path]) -> None:
    aws.deploy(synth("cpu-smoke"))
    assert stacks(aws, "kvduplex-cpu") == dict.fromkeys(PARTS, "CREATE_COMPLETE")
    (door,) = [
        door
        for door in aws.client("elbv2").describe_load_balancers()["LoadBalancers"]
        if door["LoadBalancerName"].startswith("kvduplex-cpu")
    ]
    assert door["Scheme"] == "internal"
    targets = aws.client("elbv2").describe_target_groups(LoadBalancerArn=door["LoadBalancerArn"])["TargetGroups"]
    assert [(t["HealthCheckPath"], t["Port"]) for t in targets] == [("/health", 8000)]

    aws.deploy(synth("cpu-smoke", budget={"monthly_usd": 5000, "emails": ["ops@example.com"]}))
    assert stacks(aws, "kvduplex-cpu")["observability"] == "UPDATE_COMPLETE"


def test_routers_in_containers_are_created_in_place_of_machines(aws: Aws, synth: Callable[..., Path]) -> None:
    image = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/kvduplex-router@sha256:{'0' * 64}"
    router = {"platform": "ecs", "count": 2, "container": {"image": image}}
    aws.deploy(synth("cpu-smoke", name="kvduplex-box", router=router))
    assert stacks(aws, "kvduplex-box") == dict.fromkeys(PARTS, "CREATE_COMPLETE")
    assert {name for name in groups(aws) if "box" in name} == {"kvduplex-box-prefill", "kvduplex-box-decode"}
    ecs = aws.client("ecs")
    (service,) = ecs.describe_services(cluster="kvduplex-box-router", services=["kvduplex-box-router"])["services"]
    assert service["desiredCount"] == 2
    task = ecs.describe_task_definition(taskDefinition=service["taskDefinition"])["taskDefinition"]
    containers = {container["name"]: container for container in task["containerDefinitions"]}
    assert {container["image"] for container in containers.values()} == {image}
    (variable,) = containers["router"]["environment"]
    node = load_node(variable["value"])
    assert node.state.url == "valkeys://kvduplex-router@valkey.local:6379"
    secrets = aws.client("secretsmanager")
    for source in (node.keys.clients, node.keys.engines, node.state.password):
        assert source is not None
        secret = secrets.get_secret_value(SecretId=source.secret)["SecretString"]
        assert secret
        assert secret not in variable["value"]
