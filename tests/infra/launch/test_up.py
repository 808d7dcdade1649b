"""Starting a cluster on an account in memory: what is made, what is asked first, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError

from kvduplex.ec2.cluster import instances_of
from kvduplex.ec2.errors import CapacityError, ClusterConflictError, DeclinedError, LaunchPreflightError, RequestError
from kvduplex.ec2.request import LaunchRequest
from kvduplex.ec2.start import Launcher
from kvduplex.node.document import load_node

pytestmark = pytest.mark.infra
Build = Callable[..., LaunchRequest]


def watch(launcher: Launcher, sent: list[dict[str, Any]]) -> None:
    """Note the parameters of every RunInstances call."""
    events = launcher._clients.ec2.meta.events
    events.register("provide-client-params.ec2.RunInstances", lambda params, **_: sent.append(params))


def described(account: Any) -> list[Any]:
    return [i for r in account.client("ec2").describe_instances()["Reservations"] for i in r["Instances"]]


def test_a_cluster_is_started_with_its_tags_and_node_files(account: Any, asked: Build) -> None:
    said: list[str] = []
    instances = account.launcher(said=said).up(asked())
    assert [instance.name for instance in instances] == ["decode-0", "decode-1", "prefill-0", "router-0"]
    ec2 = account.client("ec2")
    for instance in described(account):
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        asked_for = {"InstanceId": instance["InstanceId"], "Attribute": "userData"}
        data = ec2.describe_instance_attribute(**asked_for)["UserData"]["Value"]
        (file,) = yaml.safe_load(base64.b64decode(data))["write_files"]
        node = load_node(file["content"])
        assert (node.cluster, node.role.value) == ("demo", tags["kvduplex:role"])
        assert instance["IamInstanceProfile"]["Arn"].endswith("kvduplex-node")
        assert "KeyName" not in instance
    assert any("4 x" in line or "c7i.4xlarge" in line for line in said)


def test_the_clusters_own_group_lets_members_in_and_nobody_else(account: Any, asked: Build) -> None:
    account.launcher(said=[]).up(asked())
    (group,) = account.client("ec2").describe_security_groups(GroupNames=["kvduplex-demo"])["SecurityGroups"]
    (inward,) = group["IpPermissions"]
    assert inward["IpProtocol"] == "-1"
    assert [pair["GroupId"] for pair in inward["UserIdGroupPairs"]] == [group["GroupId"]]
    assert inward["IpRanges"] == []
    outward = {(rule["IpProtocol"], rule.get("ToPort")) for rule in group["IpPermissionsEgress"]}
    assert outward == {("-1", None), ("tcp", 443)}


def test_starting_again_does_nothing(account: Any, asked: Build) -> None:
    first = account.launcher(said=[]).up(asked())
    said: list[str] = []
    second = account.launcher(said=said, agrees=False).up(asked())
    assert [i.id for i in first] == [i.id for i in second]
    assert said == ["cluster demo runs already; nothing to do"]


def test_what_is_missing_is_started_alone(account: Any, asked: Build) -> None:
    first = {i.name: i.id for i in account.launcher(said=[]).up(asked())}
    account.client("ec2").terminate_instances(InstanceIds=[first["decode-1"]])
    second = {i.name: i.id for i in account.launcher(said=[]).up(asked())}
    assert second.keys() == first.keys()
    assert {name for name in first if first[name] != second[name]} == {"decode-1"}


def test_another_request_under_the_same_name_is_refused(account: Any, asked: Build) -> None:
    account.launcher(said=[]).up(asked())
    with pytest.raises(ClusterConflictError, match=r"decode-0 .* was started with other settings"):
        account.launcher(said=[]).up(asked(volume_gib=600))
    with pytest.raises(ClusterConflictError, match=r"decode-1 .* is not part of this request"):
        account.launcher(said=[]).up(asked(decode={"count": 1, "instance_type": "c7i.4xlarge"}))


def test_nothing_is_started_when_the_price_is_not_confirmed(account: Any, asked: Build) -> None:
    with pytest.raises(DeclinedError, match="not confirmed"):
        account.launcher(said=[], agrees=False).up(asked())
    assert described(account) == []
    assert account.placement_groups == {}


def test_the_price_is_said_before_it_is_confirmed(account: Any, asked: Build) -> None:
    said: list[str] = []
    with pytest.raises(DeclinedError):
        account.launcher(said=said, agrees=False).up(asked())
    assert "in total                            2.32 USD an hour" in said[-1]


def test_a_dearer_cluster_than_allowed_is_refused(account: Any, asked: Build) -> None:
    with pytest.raises(DeclinedError, match="over --max-hourly-usd 2"):
        account.launcher(said=[], max_hourly_usd=2.0).up(asked())
    assert described(account) == []


def test_an_unknown_price_has_to_be_accepted(account: Any, asked: Build) -> None:
    del account.prices["c7i.4xlarge"]
    with pytest.raises(DeclinedError, match="--accept-unknown-price"):
        account.launcher(said=[]).up(asked())
    assert described(account) == []
    assert len(account.launcher(said=[], accept_unknown_price=True).up(asked())) == 4


def test_a_dry_run_asks_ec2_and_makes_nothing(account: Any, asked: Build) -> None:
    said: list[str] = []
    account.launcher(said=said, agrees=False).up(asked(), dry_run=True)
    assert said[-1] == "dry run: EC2 would have started every machine; nothing was made"
    assert described(account) == []
    assert account.placement_groups == {}
    groups = account.client("ec2").describe_security_groups()["SecurityGroups"]
    assert "kvduplex-demo" not in {group["GroupName"] for group in groups}


def test_p5en_engines_get_an_efa_on_every_card(account: Any, asked: Build) -> None:
    request = asked(
        backend="gpu",
        recipe="qwen3-32b-p5en",
        model=None,
        prefill={"count": 1, "instance_type": "p5en.48xlarge"},
        decode={"count": 1, "instance_type": "p5en.48xlarge"},
    )
    sent: list[dict[str, Any]] = []
    launcher = account.launcher(said=[])
    watch(launcher, sent)
    launcher.up(request)
    prefill, decode, router = sent
    for engine in (prefill, decode):
        interfaces = [
            (i["NetworkCardIndex"], i["DeviceIndex"], i["InterfaceType"]) for i in engine["NetworkInterfaces"]
        ]
        assert interfaces[:2] == [(0, 0, "interface"), (0, 1, "efa-only")]
        assert interfaces[2:] == [(card, 0, "efa-only") for card in range(1, 16)]
        assert engine["Placement"] == {"GroupName": "kvduplex-demo"}
        assert not any("AssociatePublicIpAddress" in i for i in engine["NetworkInterfaces"])
    assert len(router["NetworkInterfaces"]) == 1
    assert "Placement" not in router
    for machine in sent:
        assert machine["MetadataOptions"]["HttpTokens"] == "required"
        assert machine["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert all(mapping["Ebs"]["Encrypted"] for mapping in machine["BlockDeviceMappings"])
    assert account.placement_groups["kvduplex-demo"]["Strategy"] == "cluster"


def test_a_capacity_block_is_targeted_without_a_placement_group(account: Any, asked: Build) -> None:
    zone = account.client("ec2").describe_subnets(SubnetIds=[account.subnet])["Subnets"][0]["AvailabilityZone"]
    account.reservations = [
        {"InstanceType": "p5en.48xlarge", "AvailabilityZone": zone, "State": "active", "AvailableInstanceCount": 2}
    ]
    request = asked(
        backend="gpu",
        recipe="qwen3-32b-p5en",
        model=None,
        prefill={"count": 1, "instance_type": "p5en.48xlarge"},
        decode={"count": 1, "instance_type": "p5en.48xlarge"},
        reservation="cr-0123456789abcdef0",
        capacity_block=True,
    )
    sent: list[dict[str, Any]] = []
    launcher = account.launcher(said=[])
    watch(launcher, sent)
    launcher.up(request)
    for engine in sent[:2]:
        assert engine["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
        target = engine["CapacityReservationSpecification"]["CapacityReservationTarget"]
        assert target == {"CapacityReservationId": "cr-0123456789abcdef0"}
        assert "Placement" not in engine
    assert account.placement_groups == {}


def test_a_machine_that_cannot_be_had_takes_the_others_back(account: Any, asked: Build) -> None:
    launcher = account.launcher(said=[])
    real = launcher._clients.ec2.run_instances

    def scarce(**parameters: Any) -> Any:
        if "decode-1" in str(parameters["TagSpecifications"]):
            raise ClientError({"Error": {"Code": "InsufficientInstanceCapacity", "Message": "none"}}, "RunInstances")
        return real(**parameters)

    launcher._clients.ec2.run_instances = scarce
    with pytest.raises(CapacityError, match=r"decode-1 .*InsufficientInstanceCapacity.*2 machines of this call"):
        launcher.up(asked())
    assert instances_of("demo", ec2=account.client("ec2")) == ()


def test_replicas_are_started_without_prefill_machines(account: Any, asked: Build) -> None:
    account.quotas["L-2C3B7624"] = 256.0
    account.prices["trn1.32xlarge"] = 21.5
    replicas = {"count": 1, "instance_type": "trn1.32xlarge"}
    subnets = account.client("ec2").describe_subnets()["Subnets"]
    subnet = next(s["SubnetId"] for s in subnets if s["AvailabilityZone"] == "us-east-2c")  # where trn1 is offered
    recipe = {"backend": "neuron", "recipe": "llama-3.1-8b-trn1", "model": None}
    request = asked(**recipe, subnet=subnet, prefill=None, decode=replicas)
    names = [instance.name for instance in account.launcher(said=[]).up(request)]
    assert names == ["replica-0", "router-0"]
    said: list[str] = []
    account.launcher(said=said).up(request)
    assert said == ["cluster demo runs already; nothing to do"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quotas": {"L-1216C47A": 16.0}}, "launch.quota"),
        ({"reservation_zone": "us-east-2z"}, "launch.reservation"),
    ],
)
def test_preflight_names_what_aws_would_refuse(account: Any, asked: Build, change: dict[str, Any], said: str) -> None:
    changes: dict[str, Any] = {}
    if "quotas" in change:
        account.quotas |= change["quotas"]
    else:
        there = {"InstanceType": "c7i.4xlarge", "AvailabilityZone": change["reservation_zone"], "State": "active"}
        account.reservations = [there]
        changes = {"reservation": "cr-0123456789abcdef0"}
    with pytest.raises(LaunchPreflightError, match=rf"{said}.*To mend it"):
        account.launcher(said=[]).up(asked(**changes))
    assert described(account) == []


def test_a_group_that_keeps_its_members_apart_is_refused(account: Any, asked: Build) -> None:
    made = account.client("ec2").create_security_group(GroupName="apart", Description="x", VpcId=account.vpc)
    group = made["GroupId"]
    with pytest.raises(LaunchPreflightError, match="none lets its members reach each other"):
        account.launcher(said=[]).up(asked(security_groups=(group,)))


def test_a_zone_without_the_type_is_refused_with_those_that_have_it(account: Any, asked: Build) -> None:
    handler = account._handler("offers", lambda _: {"InstanceTypeOfferings": [{"Location": "us-east-2b"}]})
    launcher = account.launcher(said=[])
    launcher._clients.ec2.meta.events.register("before-call.ec2.DescribeInstanceTypeOfferings", handler)
    with pytest.raises(LaunchPreflightError, match="use a subnet in us-east-2b"):
        launcher.up(asked())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"backend": "neuron", "recipe": "x"},
            "c7i.4xlarge has no accelerators, backend neuron needs neuron",
        ),
        (
            {"prefill": {"count": 0, "instance_type": "c7i.4xlarge"}},
            "prefill.count: input should be greater than",
        ),
        ({"prefill": None}, "only recipes of replicas go without"),
        ({"subnet": "subnet"}, "subnet: string should match pattern"),
        ({"capacity_block": True}, "name the block with --reservation"),
        ({"cluster": "Demo"}, "cluster: string should match pattern"),
        ({"backend": "host", "model": None}, "model: give model.id"),
        (
            {
                "backend": "neuron",
                "recipe": "x",
                "prefill": {"count": 1, "instance_type": "trn2.3xlarge"},
                "decode": {"count": 1, "instance_type": "trn2.3xlarge"},
            },
            "trn2.3xlarge cannot move KV between machines",
        ),
        (
            {
                "backend": "neuron",
                "recipe": "llama-3.1-8b-trn2",
                "prefill": {"count": 1, "instance_type": "trn1.32xlarge"},
                "decode": {"count": 1, "instance_type": "trn1.32xlarge"},
            },
            "recipe llama-3.1-8b-trn2 is for trn2.48xlarge or trn2u.48xlarge, not for trn1.32xlarge",
        ),
        (
            {
                "backend": "gpu",
                "recipe": "qwen3-32b",
                "prefill": {"count": 1, "instance_type": "p5en.48xlarge"},
                "decode": {"count": 1, "instance_type": "p5en.48xlarge"},
            },
            "did you mean qwen3-32b-p5",
        ),
        ({"options": {"turbo": 1}}, "turbo: unknown key"),
    ],
)
def test_a_request_that_cannot_work_is_refused_before_aws_is_asked(
    asked: Build, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**changes)
    assert said in str(caught.value)
