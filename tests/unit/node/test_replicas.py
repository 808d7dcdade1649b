"""A cluster of engines that do whole turns: found by their tag, and routed to as plain engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from kvduplex.node.config import Discovery
from kvduplex.node.discovery import Engines, discover
from kvduplex.node.document import parse_node
from kvduplex.node.routing import check_router_file, router_document


def instance(address: str, **tags: str) -> dict[str, Any]:
    return {
        "PrivateIpAddress": address,
        "Tags": [{"Key": f"kvduplex:{key.replace('_', '-')}", "Value": value} for key, value in tags.items()],
    }


@pytest.fixture
def node() -> Any:
    values = {"cluster": "demo", "role": "router", "discovery": {"ec2_tags": {"kvduplex:cluster": "demo"}}}
    return parse_node(values, where="node.yaml")


def test_replicas_are_found_unless_they_drain() -> None:
    ec2 = boto3.Session(region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x").client("ec2")
    instances = [
        instance("10.0.0.2", role="replica", http_port="8200"),
        instance("10.0.0.1", role="replica", http_port="8201"),
        instance("10.0.0.3", role="replica", http_port="8200", state="draining"),
    ]
    with Stubber(ec2) as stub:
        stub.add_response("describe_instances", {"Reservations": [{"Instances": instances}]})
        found = discover(Discovery(ec2_tags={"kvduplex:cluster": "demo"}), ec2=ec2)
    assert found == Engines(replicas=("http://10.0.0.1:8201", "http://10.0.0.2:8200"))
    assert found.serve_a_turn


def test_the_router_takes_them_as_plain_engines(node: Any, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(router_document(node, Engines(replicas=("http://10.0.0.1:8200",)), keys_file=None))
    config = check_router_file(file)
    assert [engine.url for engine in config.engines] == ["http://10.0.0.1:8200"]
    assert config.prefill == config.decode == ()


def test_both_roles_come_before_replicas(node: Any, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    engines = Engines(("http://a:1",), ("http://b:1",), ("http://c:1",))
    file.write_text(router_document(node, engines, keys_file=None))
    assert check_router_file(file).engines == ()
