"""Calls that moto lacks, held to the service's own request and response shapes by botocore's stubber."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from kvduplex.ec2.pricing import Cost, CostLine, hourly_price
from kvduplex.ec2.quota import quota_findings, quota_of
from kvduplex.ec2.resources import ensure_placement_group
from kvduplex_transfer.interface import Severity

TAGS = [{"Key": "kvduplex:cluster", "Value": "demo"}, {"Key": "Name", "Value": "kvduplex-demo"}]
OFFER = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": "63.2960000000"}}}}}}}
FREE = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": "0.0000000000"}}}}}}}


SESSION: Any = boto3.Session(region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")


def client(service: str) -> Any:
    return SESSION.client(service)


@pytest.mark.parametrize(
    ("products", "price"), [([OFFER], 63.296), ([FREE, OFFER], 63.296), ([FREE], None), ([], None)], ids=str
)
def test_the_price_is_the_on_demand_one(products: list[object], price: float | None) -> None:
    pricing = client("pricing")
    with Stubber(pricing) as stub:
        stub.add_response("get_products", {"PriceList": [json.dumps(product) for product in products]})
        assert hourly_price("p5en.48xlarge", region="us-east-2", pricing=pricing) == price


def test_a_placement_group_is_made_once_with_its_tags() -> None:
    ec2 = client("ec2")
    filters = {"Filters": [{"Name": "tag:kvduplex:cluster", "Values": ["demo"]}]}
    specification = [{"ResourceType": "placement-group", "Tags": TAGS}]
    with Stubber(ec2) as stub:
        stub.add_response("describe_placement_groups", {"PlacementGroups": []}, filters)
        made = {"GroupName": "kvduplex-demo", "Strategy": "cluster", "TagSpecifications": specification}
        stub.add_response("create_placement_group", {}, made)
        stub.add_response("describe_placement_groups", {"PlacementGroups": [{"GroupName": "kvduplex-demo"}]}, filters)
        assert ensure_placement_group("demo", ec2=ec2) == "kvduplex-demo"
        assert ensure_placement_group("demo", ec2=ec2) == "kvduplex-demo"
        stub.assert_no_pending_responses()


@pytest.mark.parametrize(("limit", "severity"), [(384.0, Severity.OK), (383.0, Severity.FAIL)])
def test_a_quota_counts_what_runs_and_what_is_asked_for(limit: float, severity: Severity) -> None:
    ec2, quotas = client("ec2"), client("service-quotas")
    types = {"InstanceTypes": [{"InstanceType": "p5en.48xlarge", "VCpuInfo": {"DefaultVCpus": 192}}]}
    running = {"Instances": [{"InstanceType": "p5en.48xlarge"}, {"InstanceType": "c7i.large"}]}
    with Stubber(ec2) as ec2_stub, Stubber(quotas) as quota_stub:
        ec2_stub.add_response("describe_instance_types", types)
        quota_stub.add_response(
            "get_service_quota", {"Quota": {"Value": limit}}, {"ServiceCode": "ec2", "QuotaCode": "L-417A185B"}
        )
        ec2_stub.add_response("describe_instances", {"Reservations": [running]})
        ec2_stub.add_response("describe_instance_types", types)
        (finding,) = quota_findings({"p5en.48xlarge": 1}, ec2=ec2, quotas=quotas)
    assert finding.severity is severity
    assert finding.seen == f"{limit:g} vCPUs, 192 in use (Running On-Demand P instances)"


@pytest.mark.parametrize(
    ("name", "code"), [("trn2.48xlarge", "L-2C3B7624"), ("c7i.xlarge", "L-1216C47A"), ("p5.48xlarge", "L-417A185B")]
)
def test_types_count_against_their_family(name: str, code: str) -> None:
    quota = quota_of(name)
    assert quota is not None
    assert quota.code == code


def test_an_incomplete_cost_says_so() -> None:
    cost = Cost((CostLine("trn2.48xlarge", 2, None), CostLine("c7i.xlarge", 1, 0.18)))
    assert not cost.is_complete
    assert "price unknown" in cost.describe()
    assert "at least" in cost.describe()
