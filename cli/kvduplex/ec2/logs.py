"""Reading a machine's logs through Systems Manager; no port is open and no key is needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvduplex.ec2.cluster import Instance
from kvduplex.ec2.errors import LogsError

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ssm import SSMClient

__all__ = ["machine_logs", "named_instance"]

_DOCUMENT = "AWS-RunShellScript"
_POLL_S = 1.0
_RUNNING = frozenset({"Pending", "InProgress", "Delayed"})


def named_instance(instances: tuple[Instance, ...], name: str) -> Instance:
    """The instance called `name`, e.g. ``decode-0``, or with that id.

    Raises:
        LogsError: There is none.
    """
    for instance in instances:
        if name in {instance.name, instance.id}:
            return instance
    known = ", ".join(instance.name for instance in instances) or "none"
    raise LogsError(f"no machine {name!r} in this cluster; there are: {known}")


def machine_logs(
    instance: Instance,
    *,
    lines: int,
    ssm: SSMClient,
    ec2: EC2Client,
    timeout_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """The last `lines` of every log of a machine; its serial console when Systems Manager cannot reach it.

    Raises:
        LogsError: Neither can be read.
    """
    from botocore.exceptions import ClientError  # noqa: PLC0415 - only where boto3 is

    commands = [
        f"journalctl --unit='kvduplex-*' --lines={lines:d} --no-pager",
        f"tail --lines={lines:d} /var/log/kvduplex/*.log",
    ]
    try:
        sent = ssm.send_command(
            InstanceIds=[instance.id], DocumentName=_DOCUMENT, Parameters={"commands": commands}, TimeoutSeconds=60
        )
    except ClientError as error:
        if error.response["Error"]["Code"] != "InvalidInstanceId":
            raise LogsError(f"{instance.name}: Systems Manager refused: {error}. Allow ssm:SendCommand.") from error
        return _console(instance, ec2)
    return _output(instance, sent["Command"]["CommandId"], ssm, clock() + timeout_s, clock, sleep)


def _output(
    instance: Instance,
    command: str,
    ssm: SSMClient,
    deadline: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> str:
    from botocore.exceptions import ClientError  # noqa: PLC0415 - only where boto3 is

    while clock() < deadline:
        try:
            found = ssm.get_command_invocation(CommandId=command, InstanceId=instance.id)
        except ClientError as error:
            if error.response["Error"]["Code"] != "InvocationDoesNotExist":  # not there yet
                raise LogsError(f"{instance.name}: {error}. Allow ssm:GetCommandInvocation.") from error
        else:
            if found["Status"] not in _RUNNING:
                return f"{found['StandardOutputContent']}{found['StandardErrorContent']}"
        sleep(_POLL_S)
    raise LogsError(f"{instance.name}: no answer from Systems Manager in time; is the machine overloaded or stopped?")


def _console(instance: Instance, ec2: EC2Client) -> str:
    from botocore.exceptions import ClientError  # noqa: PLC0415 - only where boto3 is

    try:
        text = ec2.get_console_output(InstanceId=instance.id).get("Output", "")
    except ClientError as error:
        raise LogsError(f"{instance.name}: neither Systems Manager nor its console can be read: {error}") from error
    return f"(Systems Manager cannot reach {instance.id} yet; this is its serial console)\n{text}"
