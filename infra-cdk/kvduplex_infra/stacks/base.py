"""What every stack of a cluster has in common."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import DefaultStackSynthesizer, Environment, Stack, Tags
from constructs import Construct

from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.names import Names

__all__ = ["ClusterStack"]


class ClusterStack(Stack):
    """A stack of one cluster, named and tagged after it, in the file's region and zones.

    Args:
        scope: The app.
        part: Part of the cluster, e.g. ``network``; ends the stack's name.
        cluster: The checked cluster file.
        account: Account id, or None to leave it to the deployment.
        zones: Zones the cluster uses.
    """

    def __init__(
        self, scope: Construct, part: str, *, cluster: Cluster, account: str | None, zones: Sequence[str]
    ) -> None:
        self._zones = list(zones)
        self.cluster = cluster
        self.names = Names(cluster.name)
        super().__init__(
            scope,
            self.names.stack(part),
            env=Environment(account=account, region=cluster.region),
            description=f"kvduplex cluster {cluster.name}: {part}",
            synthesizer=DefaultStackSynthesizer(generate_bootstrap_version_rule=False),
        )
        Tags.of(self).add("kvduplex:cluster", cluster.name)
        for key, value in cluster.tags.items():
            Tags.of(self).add(key, value)

    @property
    def availability_zones(self) -> list[str]:
        """The file's zones, so that nothing is looked up in an account during synthesis."""
        return self._zones
