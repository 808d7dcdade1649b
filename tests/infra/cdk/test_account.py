"""What the account is asked before it pays, and after it stopped, against an AWS in memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.stub import Stubber
from moto import mock_aws

from kvduplex_infra.account.ask import Clients, _offering, _reservation, ask, on_demand_needs
from kvduplex_infra.account.cost import machines_of
from kvduplex_infra.account.leftovers import leftovers
from kvduplex_infra.cluster.file import parse_cluster
from kvduplex_infra.cluster.model import Cluster
from kvduplex_transfer.interface import Finding, Severity

pytestmark = pytest.mark.infra
CLUSTERS = Path(__file__).parents[3] / "infra-cdk" / "clusters"
PARAMETER = "/kvduplex/images/cpu/0.1.0/ami"
RESERVATION = "cr-0123456789abcdef0"


def cluster(name: str = "cpu-smoke", **changes: Any) -> Cluster:
    values = {**yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text()), **changes}
    return parse_cluster(values, where=name, now=datetime(2026, 12, 1, tzinfo=UTC))


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[boto3.Session]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with mock_aws():
        yield boto3.Session(region_name="us-east-2")


def clients(aws: boto3.Session) -> Clients:
    quotas = aws.client("service-quotas")
    return Clients(ec2=aws.client("ec2"), quotas=quotas, ssm=aws.client("ssm"))


def with_quota(made: Clients, vcpus: float) -> Clients:
    """Moto's quotas are empty, so their answers are stubbed."""
    stub = Stubber(made.quotas)
    for _ in range(2):
        stub.add_response("get_service_quota", {"Quota": {"Value": vcpus}})
    stub.activate()
    return made


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_an_account_that_has_everything(aws: boto3.Session) -> None:
    aws.client("ssm").put_parameter(Name=PARAMETER, Value="ami-12345678", Type="String")
    found = by_check(ask(cluster(), clients=with_quota(clients(aws), 1000)))
    assert {finding.severity for finding in found.values()} == {Severity.OK}, found
    assert "ami-12345678" in found["image"].seen


def test_a_missing_image_and_too_small_a_quota_are_told_with_their_remedy(aws: boto3.Session) -> None:
    found = by_check(ask(cluster(), clients=with_quota(clients(aws), 4)))
    assert found["image"].severity is Severity.FAIL
    assert f"{PARAMETER}:1 is not there" in found["image"].seen
    assert "request-service-quota-increase" in found["launch.quota"].fix


def test_a_type_that_the_zone_lacks_names_the_nearest(aws: boto3.Session) -> None:
    ec2 = aws.client("ec2")
    offers = [{"InstanceType": "c7i.2xlarge", "Location": "us-east-2c", "LocationType": "availability-zone"}]
    cpu = cluster()
    with Stubber(ec2) as stub:
        stub.add_response("describe_instance_type_offerings", {"InstanceTypeOfferings": offers})
        finding = _offering(cpu, "decode", cpu.decode, ec2)
    assert finding.severity is Severity.FAIL
    assert finding.fix == "zone: us-east-2c"


def reserved(count: int = 2, kind: str = "trn2.48xlarge", state: str = "active") -> dict[str, Any]:
    row = {"InstanceType": kind, "AvailabilityZone": "us-east-2b", "State": state, "TotalInstanceCount": count}
    return {"CapacityReservations": [row]}


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        (reserved(), ""),
        (reserved(count=1), "decode.count: 1"),
        (reserved(kind="p5en.48xlarge"), "decode.instance_type: p5en.48xlarge"),
        (reserved(state="expired"), "is expired"),
    ],
)
def test_a_reservation_is_compared_with_the_file(aws: boto3.Session, answer: dict[str, Any], fix: str) -> None:
    capacity = {"kind": "reservation", "id": RESERVATION, "zone": "us-east-2b"}
    fleet = cluster("trn2", decode={"instance_type": "trn2.48xlarge", "count": 2, "capacity": capacity}).decode
    ec2 = aws.client("ec2")
    with Stubber(ec2) as stub:
        stub.add_response("describe_capacity_reservations", answer, {"CapacityReservationIds": [RESERVATION]})
        finding = _reservation("decode", fleet, fleet.capacity, ec2)  # type: ignore[arg-type]
    assert (finding.severity is Severity.OK) == (not fix)
    assert fix in finding.fix


def test_reserved_machines_do_not_count_against_quotas() -> None:
    capacity = {"kind": "reservation", "id": RESERVATION, "zone": "us-east-2b"}
    trn2 = cluster("trn2", decode={"instance_type": "trn2.48xlarge", "count": 2, "capacity": capacity})
    assert machines_of(trn2) == {"trn2.48xlarge": 3, "c7i.xlarge": 2}
    assert on_demand_needs(trn2) == {"trn2.48xlarge": 1, "c7i.xlarge": 2}


def test_what_is_left_is_listed_with_advice(aws: boto3.Session) -> None:
    tags = [{"Key": "kvduplex:cluster", "Value": "c"}]
    cloudformation: Any = aws.client("cloudformation")
    body = '{"Resources": {"T": {"Type": "AWS::SNS::Topic"}}}'
    cloudformation.create_stack(StackName="c-network", TemplateBody=body, Tags=tags)
    cloudformation.create_stack(StackName="other", TemplateBody=body)
    s3: Any = aws.client("s3")
    place = {"LocationConstraint": "us-east-2"}
    s3.create_bucket(Bucket="c-logs", CreateBucketConfiguration=place)
    s3.put_bucket_tagging(Bucket="c-logs", Tagging={"TagSet": tags})
    tagging = aws.client("resourcegroupstaggingapi")
    found = [str(one) for one in leftovers("c", cloudformation=cloudformation, tagging=tagging)]
    assert any("c-logs" in one and "access logs" in one for one in found)
    assert any(one.startswith("stack c-network: is CREATE_COMPLETE") for one in found)
    assert not [one for one in found if "other" in one]
    assert leftovers("nobody", cloudformation=cloudformation, tagging=tagging) == []
