"""The command line over a cluster's life: up, status, logs, terminate."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from kvduplex.ec2.cluster import instances_of
from kvduplex.ec2.command import app
from kvduplex.ec2.errors import LogsError
from kvduplex.ec2.finish import leftovers
from kvduplex.ec2.logs import machine_logs, named_instance

pytestmark = pytest.mark.infra
RUN = CliRunner()


def up(account: Any, *more: str) -> Any:
    arguments = ["up", "demo", "--region", "us-east-2", "--subnet", account.subnet, "--ami", account.ami]
    arguments += ["--instance-profile", "kvduplex-node", "--backend", "host", "--instance-type", "c7i.4xlarge"]
    return RUN.invoke(app, [*arguments, "--model", "Qwen/Qwen3-0.6B", *more], catch_exceptions=False)


def test_a_cluster_lives_and_ends_and_leaves_nothing(account: Any) -> None:
    assert up(account, "--yes").exit_code == 0
    shown = RUN.invoke(app, ["status", "demo", "--region", "us-east-2"], catch_exceptions=False)
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["MACHINE", "decode-0", "prefill-0", "router-0"]
    logs = RUN.invoke(app, ["logs", "demo", "decode-0", "--region", "us-east-2"], catch_exceptions=False)
    assert logs.exit_code == 0
    ended = RUN.invoke(app, ["terminate", "demo", "--region", "us-east-2", "--yes"], catch_exceptions=False)
    assert (ended.exit_code, ended.stdout) == (0, "cluster demo: nothing is left\n")
    assert list(leftovers("demo", ec2=account.client("ec2"))) == []
    assert RUN.invoke(app, ["status", "demo", "--region", "us-east-2"]).exit_code == 1
    assert up(account, "--yes").exit_code == 0


def test_a_question_answered_with_no_ends_nothing(account: Any) -> None:
    up(account, "--yes")
    refused = RUN.invoke(app, ["terminate", "demo", "--region", "us-east-2"], input="n\n")
    assert refused.exit_code == 1
    assert len(instances_of("demo", ec2=account.client("ec2"))) == 3


def test_what_is_left_is_listed(account: Any) -> None:
    up(account, "--yes")
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "kvduplex:cluster", "Value": "demo"}]}]
    made = account.client("ec2").create_volume(AvailabilityZone="us-east-2a", Size=8, TagSpecifications=tags)
    ended = RUN.invoke(app, ["terminate", "demo", "--region", "us-east-2", "--yes"], catch_exceptions=False)
    assert ended.exit_code == 1
    assert f"volume {made['VolumeId']} (8 GiB, available)" in ended.stdout


def test_an_unknown_machine_is_refused_with_those_that_are(account: Any) -> None:
    up(account, "--yes")
    with pytest.raises(LogsError, match="there are: decode-0, prefill-0, router-0"):
        named_instance(instances_of("demo", ec2=account.client("ec2")), "decode-7")


def test_logs_are_read_by_systems_manager_with_numbers_only(account: Any) -> None:
    up(account, "--yes")
    clients = account.clients()
    sent: list[dict[str, Any]] = []
    clients.ssm.meta.events.register("provide-client-params.ssm.SendCommand", lambda params, **_: sent.append(params))
    instance = instances_of("demo", ec2=clients.ec2)[0]
    machine_logs(instance, lines=7, ssm=clients.ssm, ec2=clients.ec2)
    assert sent[0]["Parameters"]["commands"] == [
        "journalctl --unit='kvduplex-*' --lines=7 --no-pager",
        "tail --lines=7 /var/log/kvduplex/*.log",
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--set", "max_model_len"), "write KEY=VALUE"),
        (("--efa-layout", "C"), "efa_layout: input should be 'A' or 'B'"),
        (("--prefill", "0"), "only recipes of replicas go without"),
    ],
)
def test_wrong_options_are_explained(account: Any, more: tuple[str, ...], said: str) -> None:
    with pytest.raises(Exception, match=said):
        up(account, "--yes", *more)
    assert instances_of("demo", ec2=account.client("ec2")) == ()
