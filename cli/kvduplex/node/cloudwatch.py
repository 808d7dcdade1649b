"""Starts AWS's CloudWatch agent with the configuration that the node file names."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from kvduplex.errors import PreflightError
from kvduplex.node.config import NodeConfig

__all__ = ["CONTROL", "start_cloudwatch_agent"]

CONTROL = Path("/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl")
"""The agent's control program, where its package puts it."""

_CONTROL_S = 240
_SHOWN = 2000


def start_cloudwatch_agent(config: NodeConfig, *, report: Callable[[str], None], control: Path = CONTROL) -> None:
    """Fetch the agent's configuration from its SSM parameter and start the agent anew; nothing when none is named.

    A machine without the agent works as well, so its absence is reported and no error.

    Args:
        config: The node file.
        report: Is told what was done, or why nothing was.
        control: The agent's control program.

    Raises:
        PreflightError: The agent refused, or did not answer in time; a retry may help.
    """
    parameter = config.logging.agent_parameter
    if parameter is None:
        report("the node file names no logging.agent_parameter, so the CloudWatch agent is left alone")
        return
    if not control.exists():
        report(
            f"{control} is missing: this image has no CloudWatch agent, so logs stay on this machine; "
            "add cloudwatch_agent to the image recipe"
        )
        return
    _control(control, parameter)
    report(f"the CloudWatch agent runs with the configuration in {parameter}")


def _control(control: Path, parameter: str) -> None:
    command = [str(control), "-a", "fetch-config", "-m", "ec2", "-c", f"ssm:{parameter}", "-s"]
    remedy = "check that the parameter exists and that the machine's role may call ssm:GetParameter on it"
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_CONTROL_S)
    except subprocess.TimeoutExpired as error:
        raise PreflightError(f"{control}: no answer in {_CONTROL_S} s with parameter {parameter}; {remedy}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-_SHOWN:]
        raise PreflightError(f"{control}: status {done.returncode} with parameter {parameter}; {remedy}\n{said}")
