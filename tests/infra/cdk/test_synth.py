"""What every cluster's templates hold, as the app itself synthesises them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvduplex.node.config import NodeConfig
from kvduplex.node.document import load_node
from kvduplex_infra.checks import Assembly, inspect
from kvduplex_transfer.hostchecks.instances import INSTANCE_TYPES

pytestmark = pytest.mark.infra
CLUSTERS = ["trn2", "trn1", "p5en", "cpu-smoke", "efa-smoke"]
SHIPPED = Path(__file__).parents[3] / "infra-cdk" / "clusters"
GROUP = "AWS::AutoScaling::AutoScalingGroup"
TEMPLATE = "AWS::EC2::LaunchTemplate"
BLOCK = {"kind": "block", "id": "cr-0123456789abcdef0", "zone": "us-east-2b", "ends": "2099-01-15T11:30:00Z"}
RESERVATION = {"kind": "reservation", "id": "cr-0123456789abcdef0", "zone": "us-east-2b"}
Templates = Callable[..., Assembly]


def launch_data(assembly: Assembly, role: str) -> Mapping[str, Any]:
    (template,) = [t for t in assembly.resources(TEMPLATE) if t.place.logical_id.startswith(role.capitalize())]
    data: Mapping[str, Any] = template.properties["LaunchTemplateData"]
    return data


def tags_of(assembly: Assembly, role: str) -> dict[str, str]:
    instance, *_ = launch_data(assembly, role)["TagSpecifications"]
    return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}


def one(assembly: Assembly, kind: str) -> Mapping[str, Any]:
    (resource,) = assembly.resources(kind)
    return resource.properties


def plain(value: Any) -> str:
    """Text of a value, with every reference as ``<ref>``."""
    if isinstance(value, str):
        return value
    parts = value["Fn::Join"][1]
    return "".join(part if isinstance(part, str) else "<ref>" for part in parts)


def node_of(data: Mapping[str, Any]) -> NodeConfig:
    """The node file in the user data of a launch template, with something for what CloudFormation fills in."""
    text = plain(data["UserData"]["Fn::Base64"]).replace("<ref>:<ref>", "store.local:6379").replace("<ref>", "secret")
    (file,) = yaml.safe_load(text)["write_files"]
    return load_node(file["content"])


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_validator_finds_nothing(assembly: Templates, name: str) -> None:
    found = inspect(assembly(name))
    assert not found, [str(finding) for finding in found]


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_cluster_has_its_stacks(synth: Callable[..., Path], name: str) -> None:
    stacks = {path.name.split("-")[-1].removesuffix(".template.json") for path in synth(name).glob("*.template.json")}
    assert stacks == {"network", "identity", "state", "engines", "router", "observability"}


@pytest.mark.parametrize(("name", "cards"), [("trn2", 16), ("trn1", 8), ("p5en", 16), ("efa-smoke", 2)])
def test_every_card_has_its_efa(assembly: Templates, name: str, cards: int) -> None:
    data = launch_data(assembly(name), "decode")
    listed = [
        (i["NetworkCardIndex"], i["DeviceIndex"], i.get("InterfaceType", "interface"))
        for i in data["NetworkInterfaces"]
    ]
    assert listed[:2] == [(0, 0, "interface"), (0, 1, "efa-only")]
    assert listed[2:] == [(card, 0, "efa-only") for card in range(1, cards)]
    assert cards == INSTANCE_TYPES[data["InstanceType"]].efa_interfaces
    assert not [i for i in data["NetworkInterfaces"] if "AssociatePublicIpAddress" in i]


def test_layout_b_gives_each_card_an_address(assembly: Templates) -> None:
    values = {"instance_type": "trn2.48xlarge", "count": 1, "volume_gib": 300, "efa_layout": "B"}
    data = launch_data(assembly("trn2", decode=values), "decode")
    listed = [(i["NetworkCardIndex"], i["DeviceIndex"], i["InterfaceType"]) for i in data["NetworkInterfaces"]]
    assert listed == [(0, 0, "efa"), *((card, 1, "efa") for card in range(1, 16))]


def test_machines_without_efa_have_one_plain_interface(assembly: Templates) -> None:
    cpu = assembly("cpu-smoke")
    (interface,) = launch_data(cpu, "prefill")["NetworkInterfaces"]
    assert interface["AssociatePublicIpAddress"] is False
    assert "InterfaceType" not in interface
    assert "NetworkCardIndex" not in interface
    assert not list(cpu.resources("AWS::EC2::PlacementGroup"))


def test_root_volumes_are_fast_enough_for_weights(assembly: Templates) -> None:
    (mapping,) = launch_data(assembly("trn2"), "decode")["BlockDeviceMappings"]
    assert (mapping["Ebs"]["Throughput"], mapping["Ebs"]["Iops"], mapping["Ebs"]["VolumeSize"]) == (1000, 4000, 500)
    (mapping,) = launch_data(assembly("cpu-smoke"), "decode")["BlockDeviceMappings"]
    assert (mapping["Ebs"]["Throughput"], mapping["Ebs"]["Iops"]) == (125, 3000)


def test_both_roles_share_one_cluster_placement_group(assembly: Templates) -> None:
    trn2 = assembly("trn2")
    (group,) = trn2.resources("AWS::EC2::PlacementGroup")
    assert group.properties == {"Strategy": "cluster", **{k: v for k, v in group.properties.items() if k == "Tags"}}
    for role in ("prefill", "decode"):
        assert launch_data(trn2, role)["Placement"] == {"GroupName": {"Ref": group.place.logical_id}}


def test_a_capacity_block_is_targeted_and_emptied_before_its_end(assembly: Templates) -> None:
    fleet = {"instance_type": "trn2.48xlarge", "count": 1, "capacity": BLOCK}
    block = assembly("trn2", prefill=fleet, decode=fleet)
    data = launch_data(block, "decode")
    assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    target = data["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": BLOCK["id"]}
    assert "Placement" not in data
    assert not list(block.resources("AWS::EC2::PlacementGroup"))
    actions = [action.properties for action in block.resources("AWS::AutoScaling::ScheduledAction")]
    # Half an hour for EC2, ten minutes for draining, one to spare.
    assert [action["StartTime"] for action in actions] == ["2099-01-15T10:49:00Z"] * 2
    assert {action["DesiredCapacity"] for action in actions} == {0}
    rules = [rule.properties for rule in block.resources("AWS::Events::Rule")]
    patterns = [rule["EventPattern"]["detail-type"] for rule in rules if "EventPattern" in rule]
    assert patterns == [["Capacity Block Reservation Expiration Warning"]] * 2
    assert [rule["ScheduleExpression"] for rule in rules if "ScheduleExpression" in rule] == [
        "cron(30 11 14 1 ? 2099)"
    ] * 2


def test_a_reservation_is_targeted_without_a_group_it_was_not_made_in(assembly: Templates) -> None:
    fleet = {"instance_type": "trn2.48xlarge", "count": 1, "capacity": RESERVATION}
    data = launch_data(assembly("trn2", prefill=fleet), "prefill")
    assert "InstanceMarketOptions" not in data
    assert "Placement" not in data
    assert data["CapacityReservationSpecification"]["CapacityReservationTarget"]["CapacityReservationId"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_engines_stand_in_the_files_zone(assembly: Templates, name: str, synth: Callable[..., Path]) -> None:
    templates = assembly(name)
    zone = yaml.safe_load((synth(name).parent / f"{name}.yaml").read_text())["zone"]
    for group in templates.resources(GROUP):
        subnets = [templates.target(group.place.stack, s) for s in group.properties["VPCZoneIdentifier"]]
        zones = {r.properties["AvailabilityZone"] for r in map(templates.resource, subnets) if r is not None}
        if group.place.logical_id == "RouterGroup":
            assert len(zones) >= 2
        else:
            assert zones == {zone}


def test_an_option_that_the_recipe_refuses_stops_the_synthesis(tmp_path: Path) -> None:
    values = yaml.safe_load((SHIPPED / "trn2.yaml").read_text())
    values["decode"]["options"] = {"max_modl_len": 1}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, str(SHIPPED.parent / "app.py"), "--cluster", str(tmp_path / "c.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "decode.options" in done.stderr
    assert "max_modl_len: unknown key" in done.stderr


@pytest.mark.parametrize("name", CLUSTERS)
def test_user_data_is_a_node_file_that_machines_accept(assembly: Templates, name: str) -> None:
    templates = assembly(name)
    for template in templates.resources(TEMPLATE):
        node = node_of(template.properties["LaunchTemplateData"])
        assert node.launch is not None
        assert node.drain.group is not None
        assert template.place.logical_id.lower().startswith(node.role.value)


def test_machines_and_groups_agree_on_hooks_stack_and_resource(assembly: Templates) -> None:
    templates = assembly("trn2")
    for group in templates.resources(GROUP):
        role = group.place.logical_id.removesuffix("Group").lower()
        node = node_of(launch_data(templates, role))
        hooks = {h["LifecycleTransition"]: h for h in group.properties["LifecycleHookSpecificationList"]}
        launching = hooks["autoscaling:EC2_INSTANCE_LAUNCHING"]
        terminating = hooks["autoscaling:EC2_INSTANCE_TERMINATING"]
        assert node.launch is not None
        assert (node.launch.stack, node.launch.resource) == (group.place.stack, group.place.logical_id)
        assert node.launch.lifecycle_hook == launching["LifecycleHookName"]
        assert node.drain.lifecycle_hook == terminating["LifecycleHookName"]
        assert node.drain.group == group.properties["AutoScalingGroupName"]
        assert (launching["DefaultResult"], terminating["DefaultResult"]) == ("ABANDON", "CONTINUE")
        assert terminating["HeartbeatTimeout"] > node.drain.timeout_s


def test_updates_roll_one_machine_at_a_time_and_wait(assembly: Templates) -> None:
    trn2 = assembly("trn2", decode={"instance_type": "trn2.48xlarge", "count": 3})
    bodies = {place.logical_id: body for place, body in trn2.bodies() if body["Type"] == GROUP}
    for logical_id, count in (("PrefillGroup", 1), ("DecodeGroup", 3)):
        body = bodies[logical_id]
        update = body["UpdatePolicy"]["AutoScalingRollingUpdate"]
        assert update["MaxBatchSize"] == 1
        assert update["MinInstancesInService"] == count - 1
        assert update["MinSuccessfulInstancesPercent"] == 100
        assert update["PauseTime"] == body["CreationPolicy"]["ResourceSignal"]["Timeout"] == "PT120M"
        assert body["CreationPolicy"]["ResourceSignal"]["Count"] == count
        assert body["Properties"]["MaxSize"] == str(count)


def test_replicas_have_one_fleet_and_their_own_role(assembly: Templates) -> None:
    trn1 = assembly("trn1")
    assert {group.place.logical_id for group in trn1.resources(GROUP)} == {"DecodeGroup", "RouterGroup"}
    tags = tags_of(trn1, "decode")
    assert tags["kvduplex:role"] == "replica"
    assert tags["kvduplex:lease-port"] == "0"


@pytest.mark.parametrize(("changes", "lease"), [({}, "5900"), ({"connector": "stock"}, "0")])
def test_decode_engines_tell_where_they_serve(assembly: Templates, changes: dict[str, str], lease: str) -> None:
    templates = assembly("trn2", **changes)
    tags = tags_of(templates, "decode")
    assert (tags["kvduplex:http-port"], tags["kvduplex:lease-port"]) == ("8200", lease)
    assert tags["kvduplex:role"] == "decode"
    assert tags_of(templates, "prefill")["kvduplex:http-port"] == "8100"


def test_servers_with_data_parallel_ranks_tell_how_many(assembly: Templates) -> None:
    decode = {"instance_type": "trn2.48xlarge", "count": 1, "options": {"data_parallel_size": 2}}
    templates = assembly("trn2", decode=decode)
    assert tags_of(templates, "decode")["kvduplex:dp-size"] == "2"
    assert "kvduplex:dp-size" not in tags_of(templates, "prefill")


def test_the_default_door_is_internal_and_streams(assembly: Templates) -> None:
    door = one(assembly("trn2"), "AWS::ElasticLoadBalancingV2::LoadBalancer")
    attributes = {a["Key"]: a["Value"] for a in door["LoadBalancerAttributes"]}
    assert door["Scheme"] == "internal"
    assert attributes["idle_timeout.timeout_seconds"] == "4000"
    assert attributes["access_logs.s3.enabled"] == "true"
    assert attributes["routing.http.drop_invalid_header_fields.enabled"] == "true"


def test_operators_paths_do_not_pass_the_door(assembly: Templates) -> None:
    rule = one(assembly("trn2"), "AWS::ElasticLoadBalancingV2::ListenerRule")
    (condition,) = rule["Conditions"]
    assert condition["PathPatternConfig"]["Values"] == ["/metrics", "/admin*", "/dashboard*", "/openapi.json"]
    assert rule["Actions"][0]["FixedResponseConfig"]["StatusCode"] == "404"


def test_public_access_is_https_from_named_networks(assembly: Templates) -> None:
    access = {
        "mode": "public",
        "allowed_cidrs": ["203.0.113.0/24"],
        "certificate_arn": "arn:aws:acm:us-east-2:123456789012:certificate/x",
    }
    public = assembly("trn2", access=access)
    assert one(public, "AWS::ElasticLoadBalancingV2::LoadBalancer")["Scheme"] == "internet-facing"
    listener = one(public, "AWS::ElasticLoadBalancingV2::Listener")
    assert (listener["Port"], listener["Protocol"]) == (443, "HTTPS")
    assert "TLS13" in listener["SslPolicy"]
    (balancer,) = [
        group.properties
        for group in public.resources("AWS::EC2::SecurityGroup")
        if group.properties["GroupDescription"] == "The load balancer"
    ]
    (rule,) = balancer["SecurityGroupIngress"]
    assert (rule["CidrIp"], rule["FromPort"]) == ("203.0.113.0/24", 443)
    assert inspect(public) == []


@pytest.mark.parametrize("name", CLUSTERS)
def test_nothing_reaches_a_machine_from_outside_the_network(assembly: Templates, name: str) -> None:
    templates = assembly(name)
    for rule in templates.resources("AWS::EC2::SecurityGroupIngress"):
        assert "CidrIp" not in rule.properties
    for group in templates.resources("AWS::EC2::SecurityGroup"):
        cidrs = {rule.get("CidrIp") for rule in group.properties.get("SecurityGroupIngress", [])}
        assert cidrs <= {"10.42.0.0/16"}


def test_engines_are_reached_by_routers_alone(assembly: Templates) -> None:
    templates = assembly("trn2")
    descriptions = {g.place: g.properties["GroupDescription"] for g in templates.resources("AWS::EC2::SecurityGroup")}
    sources: dict[str, set[str]] = {}
    for rule in templates.resources("AWS::EC2::SecurityGroupIngress"):
        target = templates.target(rule.place.stack, rule.properties["GroupId"])
        source = templates.target(rule.place.stack, rule.properties["SourceSecurityGroupId"])
        assert target is not None
        assert source is not None
        sources.setdefault(descriptions[target], set()).add(descriptions[source])
    engines, routers = "Engines towards routers and AWS services", "Routers"
    assert sources[engines] == {routers}
    assert sources["Engines among themselves: EFA and NIXL"] == {"Engines among themselves: EFA and NIXL"}
    assert sources[routers] == {"The load balancer"}
    assert sources["The store of conversations"] == {routers}


def test_a_network_without_internet_has_no_way_out(assembly: Templates) -> None:
    trn1 = assembly("trn1")
    assert not list(trn1.resources("AWS::EC2::InternetGateway"))
    assert not list(trn1.resources("AWS::EC2::NatGateway"))
    services = {plain(e.properties["ServiceName"]).rsplit(".", 1)[-1] for e in trn1.resources("AWS::EC2::VPCEndpoint")}
    assert {"s3", "ssm", "ssmmessages", "ec2messages", "secretsmanager", "logs", "monitoring"} <= services


def test_weights_are_read_from_their_prefix_alone(assembly: Templates) -> None:
    statements = [
        s
        for policy in assembly("trn1").resources("AWS::IAM::Policy")
        for s in policy.properties["PolicyDocument"]["Statement"]
        if str(s.get("Sid", "")).startswith("ReadWeights")
    ]
    reading, listing = sorted(statements, key=lambda s: len(s["Sid"]))
    assert plain(reading["Resource"]).endswith(":s3:::amzn-s3-demo-bucket/llama-3.1-8b-instruct/*")
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["llama-3.1-8b-instruct/*"]}}


def test_engines_do_not_read_client_keys(assembly: Templates) -> None:
    templates = assembly("trn2")
    readers: dict[str, set[str]] = {}
    for policy in templates.resources("AWS::IAM::Policy"):
        for statement in policy.properties["PolicyDocument"]["Statement"]:
            if "secretsmanager:GetSecretValue" in statement["Action"]:
                # Statements of equal actions are merged, so that one may name several secrets.
                resources = statement["Resource"]
                for resource in resources if isinstance(resources, list) else [resources]:
                    secret = templates.target(policy.place.stack, resource)
                    assert secret is not None
                    readers.setdefault(secret.logical_id[:9], set()).add(policy.place.logical_id[:6])
    assert readers["ClientKey"] == {"Router"}
    assert readers["EngineKey"] == {"Prefil", "Decode", "Router"}


def test_the_store_is_reached_with_a_password_and_few_commands(assembly: Templates) -> None:
    trn2 = assembly("trn2")
    user = one(trn2, "AWS::ElastiCache::User")
    assert "-@all" in user["AccessString"]
    assert "-@dangerous" in user["AccessString"]
    assert "~kvduplex:*" in user["AccessString"]
    assert "{{resolve:secretsmanager:" in plain(user["Passwords"][0])
    assert one(trn2, "AWS::ElastiCache::ServerlessCache")["UserGroupId"]


def test_routers_use_the_store_with_tls_and_are_told_where_its_password_lies(assembly: Templates) -> None:
    trn2 = assembly("trn2")
    data = launch_data(trn2, "router")
    node = node_of(data)
    assert node.state.url == "valkeys://kvduplex-router@store.local:6379"
    assert node.state.password is not None
    assert node.state.password.secret == "secret"
    references = [part for part in data["UserData"]["Fn::Base64"]["Fn::Join"][1] if not isinstance(part, str)]
    pointed = {trn2.target("kvduplex-trn2-router", reference) for reference in references}
    secrets = {place.logical_id[:8] for place in pointed if place is not None and place.stack.endswith("-state")}
    assert {"Password", "Valkey"} <= secrets


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"router": {"instance_type": "c7i.large", "count": 1}}, False),
        ({"state": {"enabled": False}}, False),
        ({"router": {"instance_type": "c7i.large", "count": 1}, "state": {"enabled": True}}, True),
    ],
)
def test_one_router_alone_keeps_its_memory_to_itself(
    assembly: Templates, changes: dict[str, Any], shared: bool
) -> None:
    cpu = assembly("cpu-smoke", **changes)
    assert bool(list(cpu.resources("AWS::ElastiCache::ServerlessCache"))) == shared
    assert (node_of(launch_data(cpu, "router")).state.url is not None) == shared


def test_alarms_have_the_files_baselines(assembly: Templates) -> None:
    alarms = {a.properties["AlarmName"]: a.properties for a in assembly("p5en").resources("AWS::CloudWatch::Alarm")}
    assert alarms["kvduplex-p5en-Ttft"]["Threshold"] == 1.0
    assert alarms["kvduplex-p5en-Ttft"]["ExtendedStatistic"] == "p95"
    assert alarms["kvduplex-p5en-HitRate"]["ComparisonOperator"] == "LessThanThreshold"
    assert all(a["AlarmActions"] and a["OKActions"] for a in alarms.values())
    assert len(alarms) == 8


def test_routers_that_go_without_their_store_are_told_of(assembly: Templates) -> None:
    alarms = {a.properties["AlarmName"]: a.properties for a in assembly("trn2").resources("AWS::CloudWatch::Alarm")}
    alarm = alarms["kvduplex-trn2-StoreDown"]
    assert (alarm["MetricName"], alarm["Namespace"], alarm["Statistic"]) == ("StoreDown", "kvduplex", "Maximum")
    assert {d["Name"]: d["Value"] for d in alarm["Dimensions"]} == {"Cluster": "kvduplex-trn2", "Role": "router"}
    alone = assembly("cpu-smoke", state={"enabled": False})
    assert not [a for a in alone.resources("AWS::CloudWatch::Alarm") if "StoreDown" in a.properties["AlarmName"]]


def test_alarms_and_scaling_events_reach_the_operators_topic(assembly: Templates) -> None:
    trn2 = assembly("trn2")
    statements = one(trn2, "AWS::SNS::TopicPolicy")["PolicyDocument"]["Statement"]
    publishers = {s["Principal"]["Service"] for s in statements if s["Effect"] == "Allow"}
    assert publishers == {"cloudwatch.amazonaws.com"}
    key = json.dumps(one(trn2, "AWS::KMS::Key")["KeyPolicy"])
    assert "AWSServiceRoleForAutoScaling" in key
    assert "cloudwatch.amazonaws.com" in key


def test_a_budget_counts_the_clusters_tag(assembly: Templates) -> None:
    budget = {"monthly_usd": 5000, "emails": ["ops@example.com"]}
    values = one(assembly("cpu-smoke", budget=budget), "AWS::Budgets::Budget")
    assert values["Budget"]["CostFilters"] == {"TagKeyValue": ["user:kvduplex:cluster$kvduplex-cpu"]}
    assert len(values["NotificationsWithSubscribers"]) == 2


def test_machines_are_told_the_agents_configuration_that_their_stack_writes_and_may_read_it(
    assembly: Templates,
) -> None:
    p5en = assembly("p5en")
    written = {
        resource.properties["Name"]: json.loads(plain(resource.properties["Value"]))
        for resource in p5en.resources("AWS::SSM::Parameter")
    }
    readable = {
        plain(statement["Resource"]).partition(":parameter")[2]
        for policy in p5en.resources("AWS::IAM::Policy")
        for statement in policy.properties["PolicyDocument"]["Statement"]
        if statement["Action"] == "ssm:GetParameter"
    }
    for role in ("prefill", "decode", "router"):
        node = node_of(launch_data(p5en, role))
        parameter = node.logging.agent_parameter
        assert parameter == f"/kvduplex/kvduplex-p5en/cloudwatch-agent/{role}"
        assert parameter in readable
        (files,) = written[parameter]["logs"]["logs_collected"]["files"]["collect_list"]
        assert files["publish_multi_logs"] is True
        assert files["log_group_name"] == node.logging.log_group
        assert ("nvidia_gpu" in written[parameter]["metrics"]["metrics_collected"]) == (role != "router")


def test_every_resource_that_can_be_is_tagged(assembly: Templates) -> None:
    for kind in (TEMPLATE, GROUP, "AWS::EC2::VPC", "AWS::SecretsManager::Secret", "AWS::S3::Bucket"):
        for resource in assembly("trn2").resources(kind):
            text = json.dumps(resource.properties)
            assert "kvduplex-trn2" in text, resource.place


def test_two_syntheses_are_identical(synth: Callable[..., Path]) -> None:
    # The second request is another key of the cache, and the same cluster.
    first, again = synth("trn2"), synth("trn2", tags={})
    assert first != again
    names = sorted(path.name for path in first.glob("*.template.json"))
    assert len(names) == 6
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes()
