"""The agent over real HTTP services, a fixture host, and boto3 clients that check what they are asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from moto import mock_aws

from kvduplex.aws.agent import publish_metrics, services_of
from kvduplex.aws.devices import count_devices, efa_readings
from kvduplex.aws.lifecycle import Action
from kvduplex.aws.metrics import Datum, Metric
from kvduplex.aws.reporter import Place, Reporter
from kvduplex.aws.watch import Agent, Services
from kvduplex.node.document import parse_node
from kvduplex.node.metadata import InstanceMetadata
from kvduplex_transfer.hostview import FixtureHost

PLACE = Place("i-0123456789abcdef0", "c-decode", "c-decode-ready", "c-engines", "DecodeGroup")
HOOK = {"LifecycleHookName": "c-decode-ready", "AutoScalingGroupName": "c-decode", "InstanceId": PLACE.instance_id}


class Aws:
    """Stubbed clients of one machine; every call must be the one expected next."""

    def __init__(self) -> None:
        session = boto3.Session(region_name="us-east-2", aws_access_key_id="x", aws_secret_access_key="x")
        self.autoscaling = session.client("autoscaling")
        self.cloudformation = session.client("cloudformation")
        self.cloudwatch = session.client("cloudwatch")
        self.stubs = {
            "autoscaling": Stubber(self.autoscaling),
            "cloudformation": Stubber(self.cloudformation),
            "cloudwatch": Stubber(self.cloudwatch),
        }
        for stub in self.stubs.values():
            stub.activate()

    def reporter(self) -> Reporter:
        return Reporter(
            PLACE,
            autoscaling=self.autoscaling,
            cloudformation=self.cloudformation,
            cloudwatch=self.cloudwatch,
            dimensions={"Cluster": "c", "Role": "decode"},
        )

    def expect(self, service: str, call: str, **parameters: Any) -> None:
        self.stubs[service].add_response(call, {}, parameters)

    def done(self) -> None:
        for stub in self.stubs.values():
            stub.assert_no_pending_responses()


class Engine:
    """An HTTP server with the two endpoints the agent looks at."""

    def __init__(self) -> None:
        self.healthy = False
        self.tokens = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                ok = self.path == "/metrics" or outer.healthy
                self.send_response(200 if ok else 503)
                self.end_headers()
                self.wfile.write(b"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc 0.5\n")

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.server.shutdown()
    engine.server.server_close()


@pytest.fixture
def host(tmp_path: Path) -> FixtureHost:
    for n in range(2):
        device = tmp_path / f"sys/class/infiniband/efa_{n}/ports/1/hw_counters"
        device.mkdir(parents=True)
        (device / "rdma_read_bytes").write_text("100\n")
        (device / "rx_drops").write_text("1\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    return FixtureHost(tmp_path)


def test_devices_and_efa_counters_are_read_from_the_kernel(host: FixtureHost) -> None:
    assert count_devices(host) == 3
    assert efa_readings(host)[Metric.EFA_READ_BYTES].value == 200.0


def test_a_machine_becomes_ready_breaks_and_says_so(engine: Engine, host: FixtureHost) -> None:
    aws, now = Aws(), [0.0]
    services = Services((f"{engine.url}/health",), (f"{engine.url}/metrics",), 3600, 60)
    agent = Agent(services, host=host, reporter=aws.reporter(), target=lambda: "InService", clock=lambda: now[0])
    gauge = {"MetricName": "KvUsage", "Dimensions": DIMENSIONS, "Unit": "None", "Values": [0.5], "Counts": [1.0]}

    aws.expect("cloudwatch", "put_metric_data", Namespace="kvduplex", MetricData=[gauge])
    agent.look()
    assert agent.phase.value == "starting"
    aws.done()

    engine.healthy = True
    now[0] = 5.0
    aws.expect("autoscaling", "complete_lifecycle_action", **HOOK, LifecycleActionResult="CONTINUE")
    signal = {"StackName": "c-engines", "LogicalResourceId": "DecodeGroup", "UniqueId": PLACE.instance_id}
    aws.expect("cloudformation", "signal_resource", **signal, Status="SUCCESS")
    agent.look()
    assert agent.phase.value == "serving"
    aws.done()

    now[0] = 10.0
    (host.root / "dev/neuron0").unlink()
    unhealthy = {"InstanceId": PLACE.instance_id, "HealthStatus": "Unhealthy", "ShouldRespectGracePeriod": False}
    aws.expect("autoscaling", "set_instance_health", **unhealthy)
    agent.look()
    aws.done()


DIMENSIONS = [{"Name": "Cluster", "Value": "c"}, {"Name": "Role", "Value": "decode"}]


def test_a_refusal_is_final_and_throttling_is_tried_again() -> None:
    aws = Aws()
    stub = aws.stubs["autoscaling"]
    stub.add_client_error("complete_lifecycle_action", "ValidationError", "No active Lifecycle Action found")
    stub.add_client_error("complete_lifecycle_action", "Throttling", "Rate exceeded")
    assert aws.reporter().tell(Action.COMPLETE_LAUNCH) is True
    assert aws.reporter().tell(Action.COMPLETE_LAUNCH) is False


def test_what_could_not_be_told_is_told_at_the_next_look(engine: Engine, host: FixtureHost) -> None:
    aws, now = Aws(), [0.0]
    engine.healthy = True
    services = Services((f"{engine.url}/health",), (), 3600, 60)
    agent = Agent(services, host=host, reporter=aws.reporter(), target=lambda: None, clock=lambda: now[0])
    stub = aws.stubs["autoscaling"]
    stub.add_client_error("complete_lifecycle_action", "Throttling", "Rate exceeded")
    aws.stubs["cloudformation"].add_response("signal_resource", {})
    agent.look()
    aws.expect("autoscaling", "complete_lifecycle_action", **HOOK, LifecycleActionResult="CONTINUE")
    now[0] = 5.0
    agent.look()
    aws.done()


def test_distributions_are_sent_with_their_counts() -> None:
    aws = Aws()
    datum = {"MetricName": "TimeToFirstToken", "Dimensions": DIMENSIONS, "Unit": "Seconds"}
    expected = [datum | {"Values": [0.5, 2.0], "Counts": [3.0, 1.0]}]
    aws.expect("cloudwatch", "put_metric_data", Namespace="kvduplex", MetricData=expected)
    assert aws.reporter().publish([Datum(Metric.TTFT, "Seconds", (0.5, 2.0), (3.0, 1.0))])
    aws.done()


def test_services_follow_the_node_file() -> None:
    launch = {"lifecycle_hook": "h", "stack": "s", "resource": "R", "fault_after_s": 120}
    node = parse_node(
        {
            "cluster": "demo",
            "role": "decode",
            "backend": "neuron",
            "recipe": "r",
            "engine": {"http_port": 8333, "start_timeout_s": 5000},
            "launch": launch,
        },
        where="x",
    )
    assert node.launch is not None
    services = services_of(node, node.launch)
    assert services.health == ("http://127.0.0.1:8333/health",)
    assert "http://127.0.0.1:8333/metrics" in services.metrics
    assert (services.start_timeout_s, services.fault_after_s) == (5000, 120)


def test_a_container_publishes_metrics_and_tells_nothing_else(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    port = engine.server.server_address[1]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    values = {"cluster": "demo", "role": "router", "region": "us-east-2", "router": {"port": port}}
    config = parse_node(values | {"discovery": {"ec2_tags": {"a": "b"}}}, where="x")
    stop = threading.Event()
    with mock_aws():
        cloudwatch = boto3.client("cloudwatch", region_name="us-east-2")
        running = threading.Thread(
            target=publish_metrics, args=(config, InstanceMetadata(), stop), kwargs={"look_s": 0.01}
        )
        running.start()
        end = time.monotonic() + 20
        while not (found := cloudwatch.list_metrics(Namespace="kvduplex")["Metrics"]):
            assert time.monotonic() < end, "nothing was published"
            time.sleep(0.01)
        stop.set()
        running.join(20)
    assert not running.is_alive()
    expected = [{"Name": "Cluster", "Value": "demo"}, {"Name": "Role", "Value": "router"}]
    assert [(metric["MetricName"], metric["Dimensions"]) for metric in found] == [("KvUsage", expected)]
