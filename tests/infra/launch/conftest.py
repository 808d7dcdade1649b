"""A small AWS account in memory: moto, and answers for the few calls that moto lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from moto import mock_aws

from kvduplex.ec2 import command
from kvduplex.ec2.preflight import Clients
from kvduplex.ec2.request import LaunchRequest
from kvduplex.ec2.start import Launcher, Limits

REGION = "us-east-2"
PRICES = {"c7i.xlarge": 0.1785, "c7i.4xlarge": 0.714, "p5en.48xlarge": 63.296}

SESSION: Any = boto3.Session(aws_access_key_id="testing", aws_secret_access_key="testing")
"""One for all tests, because it keeps the services' models."""


class _Response:
    status_code = 200


@dataclass
class Account:
    """What the tests need to know of the account, and what they may change.

    Attributes:
        prices: Price list, USD an hour.
        quotas: vCPUs by quota code.
        reservations: Answer of DescribeCapacityReservations.
        placement_groups: Placement groups by name, with their tags.
        calls: Operations that moto lacks, as they were called.
        made: Clients by service; parsing a service's model takes a second.
    """

    ami: str
    subnet: str
    vpc: str
    prices: dict[str, float] = field(default_factory=lambda: dict(PRICES))
    quotas: dict[str, float] = field(
        default_factory=lambda: {"L-1216C47A": 64.0, "L-417A185B": 384.0, "L-2C3B7624": 0.0}
    )
    reservations: list[dict[str, Any]] = field(default_factory=list)
    placement_groups: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str, **arguments: Any) -> Any:
        """A moto client whose missing calls are answered by this account."""
        if service not in self.made:
            client = SESSION.client(service, region_name=arguments.get("region_name") or REGION)
            for operation, answer in self._answers().items():
                name, _, call = operation.partition(".")
                if name == service:
                    client.meta.events.register(f"before-call.{operation}", self._handler(call, answer))
            self.made[service] = client
        return self.made[service]

    def clients(self) -> Clients:
        return Clients(
            ec2=self.client("ec2"), iam=self.client("iam"), quotas=self.client("service-quotas"), ssm=self.client("ssm")
        )

    def launcher(self, *, said: list[str], agrees: bool = True, **limits: Any) -> Launcher:
        return Launcher(
            self.clients(),
            pricing=self.client("pricing"),
            limits=Limits(confirm=lambda _question: agrees, **limits),
            report=said.append,
            now=lambda: 1_800_000_000.0,
        )

    def _answers(self) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        return {
            "pricing.GetProducts": self._products,
            "service-quotas.GetServiceQuota": lambda given: {"Quota": {"Value": self.quotas[given["QuotaCode"]]}},
            "ec2.DescribeCapacityReservations": lambda _: {"CapacityReservations": self.reservations},
            "ec2.DescribePlacementGroups": lambda _: {"PlacementGroups": list(self.placement_groups.values())},
            "ec2.CreatePlacementGroup": self._create_placement,
            "ec2.DeletePlacementGroup": lambda given: {"Return": str(self.placement_groups.pop(given["GroupName"]))},
        }

    def _products(self, given: dict[str, Any]) -> dict[str, Any]:
        name = next(f["Value"] for f in given["Filters"] if f["Field"] == "instanceType")
        if name not in self.prices:
            return {"PriceList": []}
        dimension = {"priceDimensions": {"x": {"pricePerUnit": {"USD": str(self.prices[name])}}}}
        return {"PriceList": [json.dumps({"terms": {"OnDemand": {"offer": dimension}}})]}

    def _create_placement(self, given: dict[str, Any]) -> dict[str, Any]:
        self.placement_groups[given["GroupName"]] = {"GroupName": given["GroupName"], "Strategy": given["Strategy"]}
        return {"PlacementGroup": self.placement_groups[given["GroupName"]]}

    def _handler(self, call: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
        def handle(params: dict[str, Any], **_: Any) -> tuple[_Response, dict[str, Any]]:
            self.calls.append(call)
            body = params["body"]
            return _Response(), answer(json.loads(body) if isinstance(body, bytes | str) else _flat(body))

        return handle


def _flat(body: dict[str, Any]) -> dict[str, Any]:
    """EC2's query parameters; the few that are read here are flat."""
    return body


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """An account with an image, a subnet and an instance profile."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with mock_aws():
        ec2 = SESSION.client("ec2", region_name=REGION)
        subnet = ec2.describe_subnets()["Subnets"][0]
        image = ec2.describe_images(ImageIds=["ami-12c6146b"])["Images"][0]  # one of moto's own
        iam = SESSION.client("iam", region_name=REGION)
        iam.create_instance_profile(InstanceProfileName="kvduplex-node")
        iam.create_role(RoleName="kvduplex-node", AssumeRolePolicyDocument="{}")
        iam.add_role_to_instance_profile(InstanceProfileName="kvduplex-node", RoleName="kvduplex-node")
        made = Account(ami=image["ImageId"], subnet=subnet["SubnetId"], vpc=subnet["VpcId"])
        monkeypatch.setattr(command, "session", lambda _region: made)
        yield made


@pytest.fixture
def asked(account: Account) -> Callable[..., LaunchRequest]:
    """Builds a request for the account; a cluster of CPU engines unless changed."""

    def build(**changes: Any) -> LaunchRequest:
        values = {
            "cluster": "demo",
            "region": REGION,
            "subnet": account.subnet,
            "ami": account.ami,
            "instance_profile": "kvduplex-node",
            "backend": "host",
            "model": {"id": "Qwen/Qwen3-0.6B", "revision": "main"},
            "prefill": {"count": 1, "instance_type": "c7i.4xlarge"},
            "decode": {"count": 2, "instance_type": "c7i.4xlarge"},
        }
        return LaunchRequest.parse(values | changes)

    return build
