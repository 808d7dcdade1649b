"""The cluster's metrics, as alarms and the dashboard read them."""

from __future__ import annotations

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_elasticloadbalancingv2 as elbv2

from kvduplex.aws.metrics import Metric
from kvduplex_infra.constructs.balancer import Balancer
from kvduplex_infra.names import METRIC_NAMESPACE, Names

__all__ = ["PERIOD_MINUTES", "ClusterMetrics"]

PERIOD_MINUTES = 5
_PERIOD = Duration.minutes(PERIOD_MINUTES)


class ClusterMetrics:
    """Metrics of one cluster over five minutes.

    Args:
        names: Names of the cluster.
        door: Its load balancer.
    """

    def __init__(self, *, names: Names, door: Balancer) -> None:
        self._names = names
        self._door = door

    @property
    def hit_rate(self) -> cloudwatch.MathExpression:
        """Share of prompt tokens that were not computed again."""
        return cloudwatch.MathExpression(
            expression="cached / prompt",
            using_metrics={
                "cached": self._own(Metric.CACHED_TOKENS, "router", "Sum"),
                "prompt": self._own(Metric.PROMPT_TOKENS, "router", "Sum"),
            },
            label="hit rate",
            period=_PERIOD,
        )

    @property
    def ttft_p95(self) -> cloudwatch.Metric:
        """95th percentile of time to first token, in seconds."""
        return self._own(Metric.TTFT, "router", "p95")

    @property
    def ttft_p50(self) -> cloudwatch.Metric:
        """Median of time to first token, in seconds."""
        return self._own(Metric.TTFT, "router", "p50")

    @property
    def kv_usage(self) -> cloudwatch.Metric:
        """Highest share of a decode engine's KV blocks in use."""
        return self._own(Metric.KV_USAGE, "decode", "Maximum")

    @property
    def engines_down(self) -> cloudwatch.Metric:
        """Engines that a router may not use."""
        return self._own(Metric.ENGINES_DOWN, "router", "Maximum")

    @property
    def lease_refusals(self) -> cloudwatch.Metric:
        """Turns that lost their last turn's KV to time, memory or a fault."""
        return self._own(Metric.LEASE_REFUSALS, "router", "Sum")

    @property
    def store_down(self) -> cloudwatch.Metric:
        """Whether a router goes without the shared store."""
        return self._own(Metric.STORE_DOWN, "router", "Maximum")

    @property
    def efa_read(self) -> cloudwatch.Metric:
        """Bytes that prefill engines read over EFA."""
        return self._own(Metric.EFA_READ_BYTES, "prefill", "Sum")

    @property
    def efa_drops(self) -> cloudwatch.Metric:
        """Packets that EFA devices dropped on receipt."""
        return self._own(Metric.EFA_DROPS, "decode", "Sum")

    @property
    def routers_down(self) -> cloudwatch.IMetric:
        """Routers that the load balancer takes for dead."""
        return self._door.targets.metrics.unhealthy_host_count(period=_PERIOD, statistic="Maximum")

    @property
    def server_errors(self) -> cloudwatch.IMetric:
        """Answers with a status of 500 and above."""
        code = elbv2.HttpCodeTarget.TARGET_5XX_COUNT
        return self._door.targets.metrics.http_code_target(code, period=_PERIOD, statistic="Sum")

    def _own(self, metric: Metric, role: str, statistic: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=METRIC_NAMESPACE,
            metric_name=metric.value,
            dimensions_map={"Cluster": self._names.cluster, "Role": role},
            statistic=statistic,
            period=_PERIOD,
        )
