"""Starting the CloudWatch agent: a program stands where its control program is, and writes down how it was called."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvduplex.errors import PreflightError
from kvduplex.node.cloudwatch import start_cloudwatch_agent
from kvduplex.node.document import NodeConfigError, load_node

PARAMETER = "/kvduplex/demo/cloudwatch-agent/decode"
NODE = """\
version: 1
cluster: demo
role: decode
backend: host
model: {id: some/model}
"""


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """A control program that fails once a file `refuse` lies beside it."""
    program = tmp_path / "ctl"
    program.write_text(
        '#!/bin/sh\necho "$@" >>"$(dirname "$0")/calls"\n'
        'if [ -e "$(dirname "$0")/refuse" ]; then echo AccessDenied >&2; exit 1; fi\n'
    )
    program.chmod(0o755)
    return program


def start(control: Path, node: str = f"{NODE}logging: {{agent_parameter: {PARAMETER}}}\n") -> list[str]:
    told: list[str] = []
    start_cloudwatch_agent(load_node(node), report=told.append, control=control)
    return told


def test_the_agent_is_started_with_the_parameter_that_the_node_file_names(control: Path) -> None:
    assert start(control) == [f"the CloudWatch agent runs with the configuration in {PARAMETER}"]
    assert (control.parent / "calls").read_text() == f"-a fetch-config -m ec2 -c ssm:{PARAMETER} -s\n"


def test_without_a_parameter_the_agent_is_left_alone(control: Path) -> None:
    (told,) = start(control, NODE)
    assert "names no logging.agent_parameter" in told
    assert not (control.parent / "calls").exists()


def test_an_image_without_the_agent_says_so_and_goes_on(tmp_path: Path) -> None:
    (told,) = start(tmp_path / "absent")
    assert "this image has no CloudWatch agent" in told


def test_a_refusal_quotes_the_agent_and_names_the_permission(control: Path) -> None:
    (control.parent / "refuse").touch()
    with pytest.raises(PreflightError) as caught:
        start(control)
    assert "status 1" in str(caught.value)
    assert "AccessDenied" in str(caught.value)
    assert "ssm:GetParameter" in str(caught.value)


@pytest.mark.parametrize("name", ["no-slash", "/with space", "/a;b", "/$(id)"])
def test_a_parameter_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(NodeConfigError, match=r"logging.agent_parameter"):
        load_node(f"{NODE}logging: {{agent_parameter: {name!r}}}\n")
