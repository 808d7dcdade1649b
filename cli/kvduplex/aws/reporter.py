"""Carrying out what a machine has to tell AWS; calls that come too late are no faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvduplex.aws.lifecycle import Action
from kvduplex.aws.metrics import Datum
from kvduplex.aws.sink import CloudWatchSink, called

if TYPE_CHECKING:
    from types_boto3_autoscaling import AutoScalingClient
    from types_boto3_cloudformation import CloudFormationClient
    from types_boto3_cloudwatch import CloudWatchClient

__all__ = ["Place", "Reporter"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this machine stands.

    Attributes:
        instance_id: Its id.
        group: Auto Scaling group.
        launch_hook: Hook that holds it back until it is ready.
        stack: CloudFormation stack that waits for its signal.
        resource: Logical id that is signalled.
    """

    instance_id: str
    group: str
    launch_hook: str
    stack: str
    resource: str


class Reporter:
    """Speaks to Auto Scaling, CloudFormation and CloudWatch for one machine.

    Args:
        place: Where the machine stands.
        autoscaling: boto3 client.
        cloudformation: boto3 client.
        cloudwatch: boto3 client.
        dimensions: Of every metric.
    """

    def __init__(
        self,
        place: Place,
        *,
        autoscaling: AutoScalingClient,
        cloudformation: CloudFormationClient,
        cloudwatch: CloudWatchClient,
        dimensions: Mapping[str, str],
    ) -> None:
        self._place = place
        self._autoscaling = autoscaling
        self._cloudformation = cloudformation
        self._sink = CloudWatchSink(cloudwatch, dimensions=dimensions)

    def tell(self, action: Action) -> bool:
        """Carry out one action; False when AWS could not be reached, so that it is tried again.

        A refusal is logged and counts as told: the hook was completed, or the stack has stopped waiting.
        """
        calls: Mapping[Action, Callable[[], object]] = {
            Action.HEARTBEAT: self._heartbeat,
            Action.COMPLETE_LAUNCH: lambda: self._complete("CONTINUE"),
            Action.ABANDON_LAUNCH: lambda: self._complete("ABANDON"),
            Action.SIGNAL_SUCCESS: lambda: self._signal("SUCCESS"),
            Action.SIGNAL_FAILURE: lambda: self._signal("FAILURE"),
            Action.MARK_UNHEALTHY: self._mark_unhealthy,
        }
        return called(action.value, calls[action])

    def publish(self, data: Sequence[Datum]) -> bool:
        """Send metrics; False when they could not be sent, in which case they are dropped."""
        return self._sink.publish(data)

    def _heartbeat(self) -> object:
        return self._autoscaling.record_lifecycle_action_heartbeat(
            LifecycleHookName=self._place.launch_hook,
            AutoScalingGroupName=self._place.group,
            InstanceId=self._place.instance_id,
        )

    def _complete(self, result: str) -> object:
        return self._autoscaling.complete_lifecycle_action(
            LifecycleHookName=self._place.launch_hook,
            AutoScalingGroupName=self._place.group,
            InstanceId=self._place.instance_id,
            LifecycleActionResult=result,
        )

    def _signal(self, status: str) -> object:
        return self._cloudformation.signal_resource(
            StackName=self._place.stack,
            LogicalResourceId=self._place.resource,
            UniqueId=self._place.instance_id,
            Status="SUCCESS" if status == "SUCCESS" else "FAILURE",
        )

    def _mark_unhealthy(self) -> object:
        return self._autoscaling.set_instance_health(
            InstanceId=self._place.instance_id, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False
        )
