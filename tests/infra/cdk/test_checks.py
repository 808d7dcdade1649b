"""The validator finds what CDK, cfn-lint and cdk-nag let pass: each case breaks one thing in a sound template."""

from __future__ import annotations

import base64
from copy import deepcopy
from typing import Any

import pytest

from kvduplex_infra.checks import Assembly, inspect

SELF = {"GroupId": {"Ref": "Fabric"}, "IpProtocol": "-1"}


def sound() -> dict[str, Any]:
    """Two stacks that pass every rule, with an EFA machine on two cards."""
    return {
        "network": {
            "Resources": {
                "Subnet": {"Type": "AWS::EC2::Subnet", "Properties": {"AvailabilityZone": "us-east-2b"}},
                "Fabric": {"Type": "AWS::EC2::SecurityGroup", "Properties": {}},
                "In": {
                    "Type": "AWS::EC2::SecurityGroupIngress",
                    "Properties": {**SELF, "SourceSecurityGroupId": {"Ref": "Fabric"}},
                },
                "Out": {
                    "Type": "AWS::EC2::SecurityGroupEgress",
                    "Properties": {**SELF, "DestinationSecurityGroupId": {"Ref": "Fabric"}},
                },
            },
            "Outputs": {"Group": {"Export": {"Name": "network:Fabric"}, "Value": {"Ref": "Fabric"}}},
        },
        "engines": {
            "Resources": {
                "Template": {"Type": "AWS::EC2::LaunchTemplate", "Properties": {"LaunchTemplateData": machine()}},
                "Group": {
                    "Type": "AWS::AutoScaling::AutoScalingGroup",
                    "CreationPolicy": {"ResourceSignal": {"Count": 1}},
                    "UpdatePolicy": {"AutoScalingRollingUpdate": {"WaitOnResourceSignals": True}},
                    "Properties": {
                        "LaunchTemplate": {"LaunchTemplateId": {"Ref": "Template"}},
                        "VPCZoneIdentifier": ["subnet-1"],
                    },
                },
                "Policy": {
                    "Type": "AWS::IAM::Policy",
                    "Properties": {
                        "PolicyDocument": {
                            "Statement": [
                                {"Sid": "FindEngines", "Action": "ec2:DescribeInstances", "Resource": "*"},
                                {"Action": ["s3:GetObject"], "Resource": "arn:aws:s3:::b/*"},
                            ]
                        }
                    },
                },
            },
        },
    }


def machine() -> dict[str, Any]:
    groups = [{"Fn::ImportValue": "network:Fabric"}]
    return {
        "InstanceType": "c6in.32xlarge",
        "UserData": base64.b64encode(b"#cloud-config\n").decode(),
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"Encrypted": True}}],
        "NetworkInterfaces": [
            {"NetworkCardIndex": 0, "DeviceIndex": 0, "Groups": groups},
            {"NetworkCardIndex": 0, "DeviceIndex": 1, "InterfaceType": "efa-only", "Groups": groups},
            {"NetworkCardIndex": 1, "DeviceIndex": 0, "InterfaceType": "efa-only", "Groups": groups},
        ],
    }


def rules_broken(templates: dict[str, Any]) -> set[str]:
    return {finding.rule for finding in inspect(Assembly(templates))}


def broken_machine(path: list[Any], value: object) -> set[str]:
    templates = sound()
    section: Any = templates["engines"]["Resources"]["Template"]["Properties"]["LaunchTemplateData"]
    for part in path[:-1]:
        section = section.setdefault(part, {}) if isinstance(section, dict) else section[part]
    section[path[-1]] = value
    return rules_broken(templates)


def test_a_sound_template_has_no_findings() -> None:
    assert inspect(Assembly(sound())) == []


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (["NetworkInterfaces", 1, "InterfaceType"], "efa_only", "interfaces.type"),
        (["NetworkInterfaces", 0, "InterfaceType"], "efa-only", "interfaces.primary"),
        (["NetworkInterfaces", 0, "DeviceIndex"], 2, "interfaces.primary"),
        (["NetworkInterfaces", 2, "NetworkCardIndex"], 2, "interfaces.card"),
        (["NetworkInterfaces", 2, "NetworkCardIndex"], 0, "interfaces.primary"),
        (["NetworkInterfaces", 2], {"NetworkCardIndex": 0, "DeviceIndex": 1}, "interfaces.twice"),
        (["NetworkInterfaces", 0, "AssociatePublicIpAddress"], False, "address.several"),
        (["NetworkInterfaces", 0, "AssociatePublicIpAddress"], True, "address.public"),
        (["InstanceType"], "c7i.large", "interfaces.efa"),
        (["MetadataOptions", "HttpTokens"], "optional", "metadata"),
        (["MetadataOptions", "HttpPutResponseHopLimit"], 2, "metadata"),
        (["BlockDeviceMappings", 0, "Ebs"], {}, "volume"),
        (["KeyName"], "mine", "ssh"),
        (["InstanceMarketOptions"], {"MarketType": "capacity-block"}, "capacity.target"),
        (["UserData"], "#cloud-config", "user_data.base64"),
        (["UserData"], base64.b64encode(b"x" * 20_000).decode(), "user_data.size"),
        (["UserData"], None, "user_data.missing"),
    ],
)
def test_machines(path: list[Any], value: object, rule: str) -> None:
    assert rule in broken_machine(path, value)


def test_a_block_stands_in_no_placement_group() -> None:
    templates = sound()
    data = templates["engines"]["Resources"]["Template"]["Properties"]["LaunchTemplateData"]
    data["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    data["CapacityReservationSpecification"] = {"CapacityReservationTarget": {"CapacityReservationId": "cr-1"}}
    assert rules_broken(templates) == set()
    data["Placement"] = {"GroupName": {"Ref": "Placement"}}
    assert rules_broken(templates) == {"capacity.placement"}


@pytest.mark.parametrize("missing", ["In", "Out"])
def test_efa_groups_let_themselves_in_and_out(missing: str) -> None:
    templates = sound()
    del templates["network"]["Resources"][missing]
    assert rules_broken(templates) == {"efa.self"}


def test_efa_groups_let_nobody_else_in() -> None:
    templates = sound()
    rule = {"GroupId": {"Ref": "Fabric"}, "IpProtocol": "tcp", "CidrIp": "10.0.0.0/8", "FromPort": 80, "ToPort": 80}
    templates["network"]["Resources"]["Other"] = {"Type": "AWS::EC2::SecurityGroupIngress", "Properties": rule}
    assert rules_broken(templates) == {"efa.others"}


def test_a_self_rule_of_one_protocol_is_not_enough() -> None:
    templates = sound()
    templates["network"]["Resources"]["In"]["Properties"]["IpProtocol"] = "tcp"
    assert "efa.self" in rules_broken(templates)


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ({"CidrIp": "0.0.0.0/0", "FromPort": 443, "ToPort": 443}, "ingress.everyone"),
        ({"CidrIpv6": "::/0", "FromPort": 443, "ToPort": 443}, "ingress.everyone"),
        ({"CidrIp": "10.0.0.0/8", "FromPort": 0, "ToPort": 65535}, "ingress.ssh"),
    ],
)
def test_open_doors(rule: dict[str, Any], found: str) -> None:
    templates = sound()
    group = {"Type": "AWS::EC2::SecurityGroup", "Properties": {"SecurityGroupIngress": [rule]}}
    templates["network"]["Resources"]["Door"] = group
    assert rules_broken(templates) == {found}


def test_machines_with_efa_stand_in_one_subnet() -> None:
    templates = sound()
    templates["engines"]["Resources"]["Group"]["Properties"]["VPCZoneIdentifier"] = ["subnet-1", "subnet-2"]
    assert rules_broken(templates) == {"zone"}


@pytest.mark.parametrize("key", ["CreationPolicy", "UpdatePolicy"])
def test_groups_wait_for_signals(key: str) -> None:
    templates = sound()
    del templates["engines"]["Resources"]["Group"][key]
    assert rules_broken(templates) == {"rolling"}


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ({"Action": "ec2:DescribeInstances", "Resource": "*"}, "iam.everything"),
        ({"Sid": "Other", "Action": ["s3:GetObject"], "Resource": ["*"]}, "iam.everything"),
        ({"Action": "s3:*", "Resource": "arn:aws:s3:::b"}, "iam.actions"),
    ],
)
def test_permissions_are_scoped_or_explained(statement: dict[str, Any], found: str) -> None:
    templates = deepcopy(sound())
    document = templates["engines"]["Resources"]["Policy"]["Properties"]["PolicyDocument"]
    document["Statement"].append(statement)
    assert rules_broken(templates) == {found}


def test_roles_carry_no_managed_policy() -> None:
    templates = sound()
    role = {"Type": "AWS::IAM::Role", "Properties": {"ManagedPolicyArns": ["arn:aws:iam::aws:policy/X"]}}
    templates["engines"]["Resources"]["Role"] = role
    assert rules_broken(templates) == {"iam.managed"}


def test_a_finding_names_place_rule_and_remedy() -> None:
    templates = sound()
    del templates["network"]["Resources"]["In"]
    (finding,) = inspect(Assembly(templates))
    assert str(finding) == "network/Fabric: efa.self: no ingress of all traffic with itself; EFA needs it"
