"""Every name that two stacks, or a stack and a machine, must agree on."""

from __future__ import annotations

from dataclasses import dataclass

from kvduplex.aws.sink import NAMESPACE
from kvduplex.node.discovery import CLUSTER_TAG, ROLE_TAG

__all__ = ["ENGINES_PER_MACHINE", "EVENTS_PORT", "METRIC_NAMESPACE", "ROUTER_PORT", "STATE_USER", "Names"]

METRIC_NAMESPACE = NAMESPACE
ENGINES_PER_MACHINE = 32
"""Width of every port range that engines of one machine may take."""
EVENTS_PORT = 5557
ROUTER_PORT = 8000
STATE_USER = "kvduplex-router"
"""The routers' user in the shared store."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names derived from the cluster's.

    Attributes:
        cluster: Name of the cluster.
    """

    cluster: str

    def stack(self, part: str) -> str:
        """CloudFormation stack of a part, e.g. ``engines``."""
        return f"{self.cluster}-{part}"

    def group(self, role: str) -> str:
        """Auto Scaling group of a role."""
        return f"{self.cluster}-{role}"

    def launch_hook(self, role: str) -> str:
        """Hook that holds a machine back until it is ready."""
        return f"{self.cluster}-{role}-ready"

    def terminate_hook(self, role: str) -> str:
        """Hook that holds a machine back until it is drained."""
        return f"{self.cluster}-{role}-drained"

    def logical_id(self, role: str) -> str:
        """Logical id of a role's Auto Scaling group, which machines signal."""
        return f"{role.capitalize()}Group"

    def log_group(self, role: str) -> str:
        """Log group of a role's machines."""
        return f"/kvduplex/{self.cluster}/{role}"

    def agent_parameter(self, role: str) -> str:
        """SSM parameter with the CloudWatch agent's configuration for a role."""
        return f"/kvduplex/{self.cluster}/cloudwatch-agent/{role}"

    def tags(self, role: str) -> dict[str, str]:
        """Tags of a role's machines; routers find engines by them."""
        return {CLUSTER_TAG: self.cluster, ROLE_TAG: role, "Name": f"{self.cluster}-{role}"}
