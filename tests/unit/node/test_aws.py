"""What a machine asks of AWS: metadata from a loopback server, S3, EC2 and secrets from moto."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from botocore.stub import Stubber
from moto import mock_aws

from kvduplex.node.aws import explained
from kvduplex.node.config import Discovery, Drain, KeySource, Model
from kvduplex.node.discovery import discover
from kvduplex.node.drain import complete_hook, engine_busy, terminating
from kvduplex.node.errors import AwsError, DiscoveryError, MetadataServiceError, SecretError, WeightsError
from kvduplex.node.metadata import InstanceMetadata
from kvduplex.node.secrets import client_key_entries, read_secret, single_key
from kvduplex.node.weights import COMPLETE, copy_prefix, model_folder

SESSION: Any = boto3.Session(region_name="us-east-2", aws_access_key_id="testing", aws_secret_access_key="testing")


class Metadata(http.server.BaseHTTPRequestHandler):
    """Version 2 of the metadata service: no answer without a token."""

    values: ClassVar[dict[str, str]] = {}
    tokens: ClassVar[set[str]] = set()

    def do_PUT(self) -> None:
        token = f"token-{len(self.tokens)}"
        self.tokens.add(token)
        self._answer(200, token)

    def do_GET(self) -> None:
        path = self.path.removeprefix("/latest/meta-data/")
        if self.path == "/metrics":
            self._answer(200, self.values["metrics"])
        elif self.headers["X-aws-ec2-metadata-token"] not in self.tokens:
            self._answer(401, "")
        elif path in self.values:
            self._answer(200, self.values[path])
        else:
            self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[tuple[str, dict[str, str]]]:
    """URL of a metadata service on this machine, and its values."""
    handler = type("Handler", (Metadata,), {"values": {}, "tokens": set()})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.values  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def test_metadata_is_read_with_a_token(served: tuple[str, dict[str, str]]) -> None:
    url, values = served
    values |= {"instance-id": "i-1", "placement/region": "us-east-2", "local-ipv4": "10.0.0.7"}
    metadata = InstanceMetadata(url)
    assert (metadata.instance_id(), metadata.region(), metadata.private_address()) == ("i-1", "us-east-2", "10.0.0.7")
    assert metadata.target_lifecycle_state() is None


def test_a_machine_without_metadata_is_told_what_to_set() -> None:
    with pytest.raises(MetadataServiceError, match=r"off EC2, set region and engine\.advertised_host"):
        InstanceMetadata("http://127.0.0.1:1", timeout_s=0.5).region()


async def test_a_machine_notices_that_auto_scaling_takes_it(served: tuple[str, dict[str, str]]) -> None:
    url, values = served
    values["autoscaling/target-lifecycle-state"] = "InService"
    looks = 0

    async def sleep(seconds: float) -> None:
        nonlocal looks
        assert seconds == 5
        looks += 1
        if looks == 3:
            values["autoscaling/target-lifecycle-state"] = "Terminated"

    await terminating(InstanceMetadata(url), every_s=5, sleep=sleep)
    assert looks == 3


@pytest.mark.parametrize(
    ("metrics", "busy"),
    [
        (
            'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n',
            "2 running, 1 waiting",
        ),
        ('vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n', None),
        ('vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 1.0\n', "2 running"),
    ],
)
async def test_an_engines_work_is_read_from_its_metrics(
    served: tuple[str, dict[str, str]], metrics: str, busy: str | None
) -> None:
    url, values = served
    values["metrics"] = metrics
    assert await engine_busy(url) == busy


async def test_an_engine_that_is_gone_has_no_work() -> None:
    assert await engine_busy("http://127.0.0.1:1") is None


def test_a_hook_is_completed_only_when_there_is_one() -> None:
    calls: list[dict[str, str]] = []

    class AutoScaling:
        def complete_lifecycle_action(self, **arguments: str) -> None:
            calls.append(arguments)

    complete_hook(Drain(), "i-1", autoscaling=AutoScaling())  # type: ignore[arg-type]
    assert calls == []
    complete_hook(Drain(lifecycle_hook="drain", group="g"), "i-1", autoscaling=AutoScaling())  # type: ignore[arg-type]
    assert calls[0]["LifecycleActionResult"] == "CONTINUE"
    assert (calls[0]["LifecycleHookName"], calls[0]["AutoScalingGroupName"], calls[0]["InstanceId"]) == (
        "drain",
        "g",
        "i-1",
    )


@pytest.fixture
def aws() -> Iterator[Any]:
    with mock_aws():
        yield SESSION


def put(aws: Any, files: dict[str, bytes]) -> Any:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="weights", CreateBucketConfiguration={"LocationConstraint": "us-east-2"})
    for key, data in files.items():
        s3.put_object(Bucket="weights", Key=key, Body=data)
    return s3


def test_weights_arrive_whole_and_only_what_changed_is_copied_again(aws: Any, tmp_path: Path) -> None:
    s3 = put(aws, {"m/config.json": b"{}", "m/a/part-1": b"one", "m/old": b"old", "other/x": b"x"})
    said: list[str] = []
    copy_prefix("s3://weights/m", tmp_path / "m", s3=s3, report=said.append)
    assert (tmp_path / "m" / "a" / "part-1").read_bytes() == b"one"
    assert not (tmp_path / "m" / "x").exists()
    s3.delete_object(Bucket="weights", Key="m/old")
    s3.put_object(Bucket="weights", Key="m/a/part-1", Body=b"two")
    (tmp_path / "m" / "config.json").write_bytes(b"cut")
    copy_prefix("s3://weights/m/", tmp_path / "m", s3=s3, report=said.append)
    found = {str(p.relative_to(tmp_path / "m")): p.read_bytes() for p in (tmp_path / "m").rglob("*") if p.is_file()}
    del found[COMPLETE]
    assert found == {"config.json": b"{}", "a/part-1": b"two"}
    copy_prefix("s3://weights/m", tmp_path / "m", s3=s3, report=said.append)
    assert [line.split(": ")[1].split(",")[0] for line in said] == [
        "3 of 3 files to copy",
        "2 of 2 files to copy",
        "0 of 2 files to copy",
    ]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://weights/none", "no objects below this prefix"),
        ("s3://nobody/m", r"ListObjectsV2 was refused with NoSuchBucket"),
        ("s3://weights/bad", "would leave the folder"),
    ],
)
def test_weights_that_cannot_be_copied_are_explained(aws: Any, tmp_path: Path, url: str, said: str) -> None:
    s3 = put(aws, {"bad/../../etc/passwd": b"x"})
    with pytest.raises(WeightsError, match=said):
        copy_prefix(url, tmp_path, s3=s3, report=lambda _: None)


def test_revisions_of_a_model_lie_apart() -> None:
    folders = {model_folder(Model(id="a/b", revision=r, source="s3://weights/m", folder="/d")) for r in ("1", "2")}
    assert {str(folder) for folder in folders} == {"/d/a--b/1", "/d/a--b/2"}


def run_engine(ec2: Any, role: str, **tags: str) -> str:
    listed = [{"Key": f"kvduplex:{key.replace('_', '-')}", "Value": value} for key, value in tags.items()]
    listed += [{"Key": "kvduplex:cluster", "Value": "demo"}, {"Key": "kvduplex:role", "Value": role}]
    made = ec2.run_instances(
        ImageId="ami-12c6146b", MinCount=1, MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": listed}],
    )  # fmt: skip
    address: str = made["Instances"][0]["PrivateIpAddress"]
    return address


def test_engines_are_found_by_their_tags(aws: Any) -> None:
    ec2 = aws.client("ec2")
    prefill = run_engine(ec2, "prefill")
    leased = run_engine(ec2, "decode", http_port="9000", lease_port="9001")
    stock = run_engine(ec2, "decode", lease_port="0")
    ranks = run_engine(ec2, "decode", lease_port="9001", dp_size="4")
    run_engine(ec2, "decode", state="draining")
    run_engine(ec2, "router")
    found = discover(Discovery(ec2_tags={"kvduplex:cluster": "demo"}), ec2=ec2)
    assert found.prefill == (f"http://{prefill}:8100",)
    assert set(found.decode) == {
        f"http://{leased}:9000#lease={leased}:9001",
        f"http://{stock}:8200",
        f"http://{ranks}:8200#lease={ranks}:9001&dp_size=4",
    }
    assert discover(Discovery(ec2_tags={"kvduplex:cluster": "other"}), ec2=ec2).serve_a_turn is False


def test_a_lookup_that_aws_refuses_names_the_permission() -> None:
    with mock_aws():
        ec2 = SESSION.client("ec2")
        with Stubber(ec2) as stub:
            stub.add_client_error("describe_instances", "UnauthorizedOperation")
            with pytest.raises(DiscoveryError, match="may call ec2:DescribeInstances"):
                discover(Discovery(ec2_tags={"a": "b"}), ec2=ec2)


def test_keys_come_from_secrets_manager_or_a_file(aws: Any, tmp_path: Path) -> None:
    client = aws.client("secretsmanager")
    client.create_secret(Name="plain", SecretString="the-key\n")
    client.create_secret(Name="generated", SecretString='{"key": "made"}')
    file = tmp_path / "keys"
    file.write_text("from-file\n")
    assert single_key(read_secret(KeySource(secret="plain"), client=lambda: client), where="x") == "the-key"
    assert read_secret(KeySource(secret="generated"), client=lambda: client) == "made"
    assert read_secret(KeySource(file=str(file)), client=lambda: pytest.fail("not needed")).strip() == "from-file"


def test_a_missing_secret_names_the_permission(aws: Any) -> None:
    client = aws.client("secretsmanager")
    with pytest.raises(SecretError, match="may call secretsmanager:GetSecretValue"):
        read_secret(KeySource(secret="none"), client=lambda: client)


def test_client_keys_become_digests_with_their_tenants() -> None:
    entries = client_key_entries("alice k1\nk2\n", where="x")
    assert [entry.get("tenant") for entry in entries] == ["alice", None]
    assert all(len(entry["sha256"]) == 64 and "key" not in entry for entry in entries)
    listed = client_key_entries("- {key: k1, tenant: alice, requests_per_minute: 5}\n", where="x")
    assert listed == [{"sha256": entries[0]["sha256"], "tenant": "alice", "requests_per_minute": 5}]


@pytest.mark.parametrize("text", ["a b c", "- {tenant: x}", "- {key: a, sha256: b}"])
def test_malformed_client_keys_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(SecretError) as caught:
        client_key_entries(text, where="the secret")
    assert str(caught.value).startswith("the secret: ")


@pytest.mark.parametrize("text", ["one\ntwo\n", "with space", "\n"])
def test_an_engine_key_is_one_word(text: str) -> None:
    with pytest.raises(SecretError, match="exactly one key"):
        single_key(text, where="x")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NoCredentialsError(), "aws configure"),
        (EndpointConnectionError(endpoint_url="https://ec2.us-east-2.amazonaws.com"), "reaches AWS"),
        (ReadTimeoutError(endpoint_url="https://ec2.us-east-2.amazonaws.com"), "reaches AWS"),
        (ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no."}}, "DescribeInstances"), "Allow it."),
    ],
)
def test_each_kind_of_failed_call_has_its_own_remedy(error: Exception, remedy: str) -> None:
    with pytest.raises(AwsError, match=remedy), explained("looking", remedy="Allow it."):
        raise error
