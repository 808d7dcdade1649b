"""One page that shows whether the cluster does its work."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import aws_cloudwatch as cloudwatch
from constructs import Construct

from kvduplex_infra.constructs.metrics import ClusterMetrics

__all__ = ["add_dashboard"]

_WIDTH = 12


def add_dashboard(
    scope: Construct, *, name: str, metrics: ClusterMetrics, alarms: Sequence[cloudwatch.Alarm]
) -> cloudwatch.Dashboard:
    """Put alarms on top, then what users feel, then what engines do."""
    board = cloudwatch.Dashboard(scope, "Dashboard", dashboard_name=name)
    board.add_widgets(cloudwatch.AlarmStatusWidget(title="Alarms", alarms=list(alarms), width=2 * _WIDTH))
    # Hit rate and KV use side by side: both bad under right routing means too little memory.
    board.add_widgets(_graph("Hit rate", metrics.hit_rate), _graph("KV use of decode engines", metrics.kv_usage))
    board.add_widgets(
        _graph("Time to first token (s)", metrics.ttft_p50, metrics.ttft_p95),
        _graph("Refused claims", metrics.lease_refusals),
    )
    board.add_widgets(
        _graph("EFA: bytes read by prefill engines", metrics.efa_read),
        _graph("EFA: dropped packets", metrics.efa_drops),
    )
    board.add_widgets(
        _graph("Engines and routers down", metrics.engines_down, metrics.routers_down),
        _graph("Answers with 5xx", metrics.server_errors),
    )
    return board


def _graph(title: str, *metrics: cloudwatch.IMetric) -> cloudwatch.GraphWidget:
    return cloudwatch.GraphWidget(title=title, left=list(metrics), width=_WIDTH)
