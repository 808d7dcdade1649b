"""Alarms on what operators must act on, each with its baseline from the cluster file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_sns as sns
from constructs import Construct

from kvduplex_infra.cluster.capacity import CapacityBlock
from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.constructs.metrics import PERIOD_MINUTES, ClusterMetrics

__all__ = ["add_alarms", "add_block_warning"]

_PERIODS = 3
_Comparison = cloudwatch.ComparisonOperator


def add_alarms(
    scope: Construct, *, cluster: Cluster, metrics: ClusterMetrics, topic: sns.ITopic
) -> list[cloudwatch.Alarm]:
    """Make the alarms and let `topic` tell of them, of recovery too."""
    alarms = list(_alarms(scope, cluster, metrics))
    action = actions.SnsAction(topic)
    for alarm in alarms:
        alarm.add_alarm_action(action)
        alarm.add_ok_action(action)
    return alarms


def add_block_warning(scope: Construct, *, role: str, block: CapacityBlock, topic: sns.Topic) -> None:
    """Tell of a Capacity Block's end a day ahead, and when EC2 warns of it 40 minutes ahead."""
    day_before = block.ends - timedelta(days=1)
    events.Rule(
        scope,
        f"{role.capitalize()}BlockEndsTomorrow",
        description=f"Capacity Block {block.id} ends at {block.ends.isoformat()}",
        schedule=events.Schedule.cron(
            minute=str(day_before.minute),
            hour=str(day_before.hour),
            day=str(day_before.day),
            month=str(day_before.month),
            year=str(day_before.year),
        ),
        targets=[targets.SnsTopic(topic, message=_block_message(role, block))],
    )
    events.Rule(
        scope,
        f"{role.capitalize()}BlockEnds",
        description=f"EC2's own warning for {block.id}, 40 minutes before its end",
        event_pattern=events.EventPattern(
            source=["aws.ec2"],
            detail_type=["Capacity Block Reservation Expiration Warning"],
            detail={"capacity-reservation-id": [block.id]},
        ),
        targets=[targets.SnsTopic(topic, message=_block_message(role, block))],
    )


def _block_message(role: str, block: CapacityBlock) -> events.RuleTargetInput:
    return events.RuleTargetInput.from_text(
        f"The {role} fleet's Capacity Block {block.id} ends at {block.ends.isoformat()}. Its machines are drained "
        "before; extend the block or move the fleet, else the cluster stops serving."
    )


_Row = tuple[str, cloudwatch.IMetric, float, cloudwatch.ComparisonOperator, str]


def _alarms(scope: Construct, cluster: Cluster, metrics: ClusterMetrics) -> Iterator[cloudwatch.Alarm]:
    for name, metric, threshold, comparison, about in _rows(cluster, metrics):
        yield cloudwatch.Alarm(
            scope,
            name,
            alarm_name=f"{cluster.name}-{name}",
            alarm_description=about,
            metric=metric,
            threshold=threshold,
            comparison_operator=comparison,
            evaluation_periods=_PERIODS,
            datapoints_to_alarm=_PERIODS,
            # No traffic is no fault; machines that died are told of by the groups.
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        )


def _rows(cluster: Cluster, metrics: ClusterMetrics) -> Iterator[_Row]:
    """Name, metric, threshold, which side of it is wrong, and what that means."""
    limits = cluster.alarms
    refusals = limits.lease_refusals_per_minute * PERIOD_MINUTES
    low, high = _Comparison.LESS_THAN_THRESHOLD, _Comparison.GREATER_THAN_THRESHOLD
    yield "HitRate", metrics.hit_rate, limits.hit_rate_min, low, "Cached share of prompt tokens is under its baseline"
    yield "Ttft", metrics.ttft_p95, limits.ttft_p95_s, high, "95th percentile of time to first token, in seconds"
    kv_use = "KV use; with a falling hit rate: too little memory"
    yield "KvUsage", metrics.kv_usage, limits.kv_usage_max, high, kv_use
    yield "EnginesDown", metrics.engines_down, 0, high, "An engine is down as routers see it"
    yield "LeaseRefusals", metrics.lease_refusals, refusals, high, "Claims lost to time, memory or faults"
    if cluster.shares_state:
        lost = "A router goes without the shared store; turns go on, and some are computed anew"
        yield "StoreDown", metrics.store_down, 0, high, lost
    yield "RoutersDown", metrics.routers_down, 0, high, "A router is out of the load balancer"
    yield "Errors", metrics.server_errors, 10, high, "Requests that ended in a 5xx"
