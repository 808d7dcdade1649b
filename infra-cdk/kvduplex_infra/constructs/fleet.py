"""An Auto Scaling group whose machines report for themselves: readiness, drain and faults.

A new machine waits in its launch hook until its engine answers; only then does CloudFormation take it for updated,
and a machine that never gets there rolls the update back. A machine that is to go waits in its terminate hook until
its turns and leases have ended. A machine with a broken accelerator or EFA marks itself unhealthy and is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from aws_cdk import (
    CfnAutoScalingRollingUpdate,
    CfnCreationPolicy,
    CfnResourceSignal,
    CfnUpdatePolicy,
)
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from kvduplex_infra.cluster.capacity import Capacity, CapacityBlock
from kvduplex_infra.cluster.fit import BLOCK_RECLAIM
from kvduplex_infra.names import Names

__all__ = ["Fleet"]

_Group = autoscaling.CfnAutoScalingGroup
_HOOK_MAX_S = 7200
"""Longest heartbeat timeout of a lifecycle hook; machines send heartbeats within it."""
_DRAIN_MARGIN_S = 60
_SUSPENDED = ["HealthCheck", "ReplaceUnhealthy", "AZRebalance", "AlarmNotification", "ScheduledActions"]


class Fleet(Construct):
    """Machines of one role.

    Attributes:
        group: The Auto Scaling group.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        names: Names,
        role: str,
        template: ec2.CfnLaunchTemplate,
        subnets: Sequence[str],
        count: int,
        start_timeout_s: int,
        drain_timeout_s: int,
        topic_arn: str,
        capacity: Capacity,
        target_groups: Sequence[str] = (),
    ) -> None:
        super().__init__(scope, construct_id)
        self._names = names
        self._role = role
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s
        self.group = _Group(
            self,
            "Group",
            auto_scaling_group_name=names.group(role),
            min_size="0",
            max_size=str(count),
            desired_capacity=str(count),
            launch_template=_Group.LaunchTemplateSpecificationProperty(
                launch_template_id=template.ref, version=template.attr_latest_version_number
            ),
            vpc_zone_identifier=list(subnets),
            target_group_arns=list(target_groups) or None,
            health_check_type="ELB" if target_groups else "EC2",
            health_check_grace_period=start_timeout_s if target_groups else 300,
            lifecycle_hook_specification_list=self._hooks(),
            termination_policies=["OldestLaunchTemplate", "Default"],
            metrics_collection=[_Group.MetricsCollectionProperty(granularity="1Minute")],
            notification_configurations=[_notifications(topic_arn)],
            tags=[
                _Group.TagPropertyProperty(key=key, value=value, propagate_at_launch=False)
                for key, value in names.tags(role).items()
            ],
        )
        self.group.override_logical_id(names.logical_id(role))
        self._roll(count)
        if isinstance(capacity, CapacityBlock):
            self._empty_before(capacity)

    def _hooks(self) -> list[autoscaling.CfnAutoScalingGroup.LifecycleHookSpecificationProperty]:
        return [
            _Group.LifecycleHookSpecificationProperty(
                lifecycle_hook_name=self._names.launch_hook(self._role),
                lifecycle_transition="autoscaling:EC2_INSTANCE_LAUNCHING",
                heartbeat_timeout=min(self._start_timeout_s, _HOOK_MAX_S),
                default_result="ABANDON",
            ),
            _Group.LifecycleHookSpecificationProperty(
                lifecycle_hook_name=self._names.terminate_hook(self._role),
                lifecycle_transition="autoscaling:EC2_INSTANCE_TERMINATING",
                heartbeat_timeout=min(self._drain_timeout_s + _DRAIN_MARGIN_S, _HOOK_MAX_S),
                default_result="CONTINUE",
            ),
        ]

    def _roll(self, count: int) -> None:
        timeout = f"PT{-(-self._start_timeout_s // 60)}M"
        self.group.cfn_options.creation_policy = CfnCreationPolicy(
            resource_signal=CfnResourceSignal(count=count, timeout=timeout)
        )
        # One machine at a time and none on top: accelerators that could stand by are not to be had.
        self.group.cfn_options.update_policy = CfnUpdatePolicy(
            auto_scaling_rolling_update=CfnAutoScalingRollingUpdate(
                max_batch_size=1,
                min_instances_in_service=count - 1,
                min_successful_instances_percent=100,
                pause_time=timeout,
                wait_on_resource_signals=True,
                suspend_processes=_SUSPENDED,
            )
        )

    def _empty_before(self, block: CapacityBlock) -> None:
        drained_by = block.ends - BLOCK_RECLAIM - timedelta(seconds=self._drain_timeout_s + _DRAIN_MARGIN_S)
        autoscaling.CfnScheduledAction(
            self,
            "BlockEnds",
            auto_scaling_group_name=self.group.ref,
            start_time=drained_by.strftime("%Y-%m-%dT%H:%M:%SZ"),
            min_size=0,
            max_size=0,
            desired_capacity=0,
        )


def _notifications(topic_arn: str) -> autoscaling.CfnAutoScalingGroup.NotificationConfigurationProperty:
    events = ("LAUNCH", "LAUNCH_ERROR", "TERMINATE", "TERMINATE_ERROR")
    return _Group.NotificationConfigurationProperty(
        topic_arn=topic_arn, notification_types=[f"autoscaling:EC2_INSTANCE_{event}" for event in events]
    )
