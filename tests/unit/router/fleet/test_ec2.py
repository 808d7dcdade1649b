"""Engines found on EC2 instances and in Auto Scaling groups, over HTTP from a moto server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from kvduplex_router.config import Ec2Source
from kvduplex_router.fleet.discovery.ec2 import Ec2Instances
from kvduplex_router.fleet.discovery.source import DiscoveryError

REGION = "us-east-2"
IMAGE = "ami-12345678"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    patch = pytest.MonkeyPatch()
    patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # thousands of images that no test here asks for
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()
    patch.undo()


@pytest.fixture
def aws(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return boto3.client("ec2", region_name=REGION)


def launch(ec2: Any, **tags: str) -> tuple[str, str]:
    """Start an instance and return its id and address; of tag names ``__`` stands for ``:`` and ``_`` for ``-``."""
    listed = [{"Key": key.replace("__", ":").replace("_", "-"), "Value": value} for key, value in tags.items()]
    made = ec2.run_instances(
        ImageId=IMAGE, MinCount=1, MaxCount=1, TagSpecifications=[{"ResourceType": "instance", "Tags": listed}]
    )["Instances"][0]
    return made["InstanceId"], made["PrivateIpAddress"]


async def found(**config: Any) -> list[tuple[str, str, str | None, bool]]:
    source = Ec2Instances(Ec2Source(**config), interval_s=1, missing_after=1)
    members = await source.look()
    await source.close()
    return [(m.role.value, m.config.url, m.config.lease, m.leaving) for m in members]


async def test_roles_and_ports_come_from_tags(aws: Any) -> None:
    _, p = launch(aws, kvduplex__cluster="one", kvduplex__role="prefill")
    _, d = launch(aws, kvduplex__cluster="one", kvduplex__role="decode", kvduplex__http_port="8300")
    _, plain = launch(aws, kvduplex__cluster="one", kvduplex__role="decode", kvduplex__lease_port="0")
    _, leaving = launch(aws, kvduplex__cluster="one", kvduplex__role="prefill", kvduplex__state="draining")
    launch(aws, kvduplex__cluster="one", kvduplex__role="router")
    launch(aws, kvduplex__cluster="other", kvduplex__role="prefill")
    stopped, _ = launch(aws, kvduplex__cluster="one", kvduplex__role="prefill")
    aws.terminate_instances(InstanceIds=[stopped])
    assert set(await found(tags={"kvduplex:cluster": "one"})) == {
        ("prefill", f"http://{p}:8100", None, False),
        ("decode", f"http://{d}:8300", f"{d}:5900", False),
        ("decode", f"http://{plain}:8200", None, False),
        ("prefill", f"http://{leaving}:8100", None, True),
    }


async def test_servers_with_ranks_say_so_by_a_tag_or_the_configuration_does(aws: Any) -> None:
    _, tagged = launch(aws, team="moe", kvduplex__role="decode", kvduplex__dp_size="2")
    _, plain = launch(aws, team="moe", kvduplex__role="decode")
    assert await found(tags={"team": "moe"}, dp_size=1) == sorted([
        ("decode", f"http://{tagged}:8200", f"{tagged}:5900", False),
        ("decode", f"http://{tagged}:8200", f"{tagged}:5901", False),
        ("decode", f"http://{plain}:8200", f"{plain}:5900", False),
    ])  # fmt: skip
    bad, _ = launch(aws, team="bad", kvduplex__role="decode", kvduplex__dp_size="many")
    with pytest.raises(DiscoveryError, match=f"instance {bad}: .*valid integer"):
        await found(tags={"team": "bad"})


async def test_the_configuration_may_say_what_tags_do_not(aws: Any) -> None:
    _, address = launch(aws, team="blue")
    assert await found(tags={"team": "blue"}) == []
    assert await found(tags={"team": "blue"}, role="decode", http_port=80, lease_port=0, scheme="https") == [
        ("decode", f"https://{address}:80", None, False)
    ]


async def test_an_auto_scaling_group(aws: Any) -> None:
    groups = boto3.client("autoscaling", region_name=REGION)
    aws.create_launch_template(
        LaunchTemplateName="engines", LaunchTemplateData={"ImageId": IMAGE, "InstanceType": "t3.micro"}
    )
    groups.create_auto_scaling_group(
        AutoScalingGroupName="decode-fleet", MinSize=2, MaxSize=3, DesiredCapacity=2,
        LaunchTemplate={"LaunchTemplateName": "engines"}, AvailabilityZones=[f"{REGION}a"],
        Tags=[{"Key": "kvduplex:role", "Value": "decode", "PropagateAtLaunch": True}],
    )  # fmt: skip
    before = await found(group="decode-fleet")
    assert [role for role, *_ in before] == ["decode", "decode"]
    assert all(not leaving for *_, leaving in before)
    groups.update_auto_scaling_group(AutoScalingGroupName="decode-fleet", DesiredCapacity=3)
    assert len(await found(group="decode-fleet")) == 3
    groups.update_auto_scaling_group(AutoScalingGroupName="decode-fleet", MinSize=1, DesiredCapacity=1)
    assert len(await found(group="decode-fleet")) == 1


async def test_what_goes_wrong_is_said(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiscoveryError, match="there is no Auto Scaling group 'nobody' in this region"):
        await found(group="nobody")
    launch(aws, team="red", kvduplex__role="decode", kvduplex__http_port="many")
    with pytest.raises(DiscoveryError, match=r"instance i-\w+: .* has a port outside 1 to 65535"):
        await found(tags={"team": "red"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DiscoveryError, match="needs ec2:DescribeInstances"):
        await found(tags={"team": "red"})
