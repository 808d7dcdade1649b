"""The CloudWatch agent's configuration: log files, disks, memory, and GPUs where there are some.

Engine, router, Neuron and EFA metrics do not pass through this agent: it drops histograms (CloudWatch user guide,
"Prometheus metric type conversion"), and TTFT is one. The machines publish those themselves.
"""

from __future__ import annotations

import json
from typing import Any

from kvduplex.node.config import Backend
from kvduplex_infra.names import METRIC_NAMESPACE, Names

__all__ = ["configuration"]

_NVIDIA = ("utilization_gpu", "memory_used", "temperature_gpu", "power_draw")


def configuration(backend: Backend | None, names: Names, role: str) -> str:
    """The agent's JSON for machines of `role`; `backend` is None on routers."""
    values: dict[str, Any] = {
        "agent": {"metrics_collection_interval": 60, "run_as_user": "cwagent"},
        "logs": {"logs_collected": {"files": {"collect_list": [_files(names, role)]}}},
        "metrics": _host_metrics(names, role, with_gpus=backend is Backend.GPU),
    }
    return json.dumps(values, indent=1, sort_keys=True)


def _files(names: Names, role: str) -> dict[str, Any]:
    return {
        "file_path": "/var/log/kvduplex/*.log",
        "log_group_name": names.log_group(role),
        "log_stream_name": "{instance_id}",
        # Without it the agent sends the file that was written last, and no other that matches.
        "publish_multi_logs": True,
        "timezone": "UTC",
    }


def _host_metrics(names: Names, role: str, *, with_gpus: bool) -> dict[str, Any]:
    place = {"append_dimensions": {"Cluster": names.cluster, "Role": role}}
    collected: dict[str, Any] = {
        "disk": {"measurement": ["used_percent"], "resources": ["/", "/var/lib/kvduplex"], **place},
        "mem": {"measurement": ["used_percent"], **place},
    }
    if with_gpus:
        collected["nvidia_gpu"] = {"measurement": list(_NVIDIA), **place}
    return {
        "namespace": METRIC_NAMESPACE,
        "append_dimensions": {"InstanceId": "${aws:InstanceId}"},
        "aggregation_dimensions": [["Cluster", "Role"]],
        "metrics_collected": collected,
    }
