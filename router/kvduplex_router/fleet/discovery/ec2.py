"""Engines on EC2 instances, found by tags or by their Auto Scaling group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from kvduplex_router.config import Ec2Source, EngineConfig
from kvduplex_router.errors import ConfigError
from kvduplex_router.fleet.discovery.source import DiscoveryError
from kvduplex_router.fleet.engine import EngineRole
from kvduplex_router.fleet.members import Member

if TYPE_CHECKING:
    from types_boto3_autoscaling import AutoScalingClient
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import FilterTypeDef, InstanceTypeDef

__all__ = ["Ec2Instances"]

ROLE_TAG: Final = "kvduplex:role"
HTTP_PORT_TAG: Final = "kvduplex:http-port"
LEASE_PORT_TAG: Final = "kvduplex:lease-port"
DP_SIZE_TAG: Final = "kvduplex:dp-size"
STATE_TAG: Final = "kvduplex:state"
"""``draining`` on an instance whose engine is about to end."""

_HTTP_PORTS: Final = {EngineRole.PREFILL: 8100, EngineRole.DECODE: 8200, EngineRole.REPLICA: 8000}
_LEASE_PORT: Final = 5900
_CALL_S: Final = 5.0
_IDS_A_CALL: Final = 200
_IN_SERVICE: Final = "InService"
_LEAVING: Final = ("Terminating", "Detaching", "EnteringStandby")


class Ec2Instances:
    """A `Source` over EC2's API.

    It needs the rights ``ec2:DescribeInstances`` and, for a group, ``autoscaling:DescribeAutoScalingGroups``.

    Raises:
        ConfigError: boto3 is not installed, or no region is known.
    """

    def __init__(self, config: Ec2Source, *, interval_s: float, missing_after: int) -> None:
        tags = ",".join(f"{key}={value}" for key, value in sorted(config.tags.items()))
        self.name = "ec2:" + ",".join(filter(None, (tags, config.group and f"asg:{config.group}")))
        self.interval_s = interval_s
        self.missing_after = missing_after
        self._config = config
        self._ec2, self._groups, self._errors = _clients(config)
        self._looking: asyncio.Task[Sequence[Member]] | None = None

    async def look(self) -> Sequence[Member]:
        """See `Source.look`; a call that outlives its deadline is waited for by the next look."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(asyncio.to_thread(self._look))
        return await asyncio.shield(self._looking)

    async def close(self) -> None:
        """See `Source.close`; a call that runs ends at its own time limits."""
        if self._looking is not None:
            self._looking.cancel()

    def _look(self) -> Sequence[Member]:
        try:
            states = self._group_states()
            instances = list(self._instances(states))
        except self._errors as error:
            raise DiscoveryError(f"{error}; the router's role needs ec2:DescribeInstances") from None
        members = (member for instance in instances for member in self._members(instance, states))
        return sorted(members, key=lambda member: member.entry)

    def _group_states(self) -> Mapping[str, str] | None:
        """Life-cycle states by instance id; None when no group is asked for."""
        if self._config.group is None:
            return None
        pages = self._groups.get_paginator("describe_auto_scaling_groups").paginate(
            AutoScalingGroupNames=[self._config.group]
        )
        groups = [group for page in pages for group in page["AutoScalingGroups"]]
        if not groups:
            raise DiscoveryError(f"there is no Auto Scaling group '{self._config.group}' in this region")
        return {each["InstanceId"]: each["LifecycleState"] for group in groups for each in group["Instances"]}

    def _instances(self, states: Mapping[str, str] | None) -> Iterable[InstanceTypeDef]:
        filters: list[FilterTypeDef] = [{"Name": "instance-state-name", "Values": ["running"]}]
        filters += [{"Name": f"tag:{key}", "Values": [value]} for key, value in sorted(self._config.tags.items())]
        pages = self._ec2.get_paginator("describe_instances")
        if states is None:
            yield from _listed(pages.paginate(Filters=filters))
            return
        ids = sorted(states)
        for start in range(0, len(ids), _IDS_A_CALL):
            some: FilterTypeDef = {"Name": "instance-id", "Values": ids[start : start + _IDS_A_CALL]}
            yield from _listed(pages.paginate(Filters=[*filters, some]))

    def _members(self, instance: InstanceTypeDef, states: Mapping[str, str] | None) -> Sequence[Member]:
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
        address = instance.get("PrivateIpAddress")
        role = self._config.role.value if self._config.role is not None else tags.get(ROLE_TAG)
        state = _IN_SERVICE if states is None else states.get(instance["InstanceId"], "")
        leaving = STATE_TAG in tags or state.startswith(_LEAVING)
        if address is None or role not in set(EngineRole) or not (leaving or state == _IN_SERVICE):
            return ()
        try:
            entries = self._entries(EngineRole(role), address, tags)
            return [Member.of(EngineRole(role), entry, leaving=leaving) for entry in entries]
        except ValidationError as error:
            told = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise DiscoveryError(f"instance {instance['InstanceId']}: {told}") from None

    def _entries(self, role: EngineRole, address: str, tags: Mapping[str, str]) -> Sequence[EngineConfig]:
        config = self._config
        port = tags.get(HTTP_PORT_TAG, config.http_port or _HTTP_PORTS[role])
        lease = tags.get(LEASE_PORT_TAG, str(_LEASE_PORT if config.lease_port is None else config.lease_port))
        leased = role is EngineRole.DECODE and lease != "0"
        return config.at(address, port, lease_port=lease if leased else None, ranks=tags.get(DP_SIZE_TAG))


def _listed(pages: Iterable[Any]) -> Iterable[InstanceTypeDef]:
    for page in pages:
        for reservation in page["Reservations"]:
            yield from reservation.get("Instances", [])


def _clients(config: Ec2Source) -> tuple[EC2Client, AutoScalingClient, tuple[type[Exception], ...]]:
    try:
        import boto3  # noqa: PLC0415 - only routers on AWS have it
        from botocore.config import Config  # noqa: PLC0415
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
    except ImportError:
        raise ConfigError("discovery.ec2: needs boto3; pip install 'kvduplex[router,aws]'") from None
    options = Config(connect_timeout=_CALL_S, read_timeout=_CALL_S, retries={"total_max_attempts": 2})
    try:
        ec2 = boto3.client("ec2", region_name=config.region, config=options)
        groups = boto3.client("autoscaling", region_name=config.region, config=options)
    except BotoCoreError as error:
        raise ConfigError(f"discovery.ec2: {error}; set region") from None
    return ec2, groups, (BotoCoreError, ClientError)
