"""All stacks of a cluster, wired."""

from __future__ import annotations

from dataclasses import dataclass

from aws_cdk import App

from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.cluster.regions import ZONES
from kvduplex_infra.stacks.engines import EnginesStack
from kvduplex_infra.stacks.identity import IdentityStack
from kvduplex_infra.stacks.network import NetworkStack
from kvduplex_infra.stacks.observability import ObservabilityStack
from kvduplex_infra.stacks.router import RouterStack
from kvduplex_infra.stacks.state import StateStack

__all__ = ["ClusterStacks", "build_cluster", "zones_of"]


@dataclass(frozen=True, slots=True)
class ClusterStacks:
    """A cluster's stacks; `state` is None where the file turns it off."""

    network: NetworkStack
    identity: IdentityStack
    state: StateStack | None
    engines: EnginesStack
    router: RouterStack
    observability: ObservabilityStack


def zones_of(cluster: Cluster) -> list[str]:
    """Zones of the cluster's network: the engines' and at least one more, since a load balancer needs two."""
    zones = {cluster.zone, *cluster.router_zones}
    others = (cluster.region + letter for letter in ZONES.get(cluster.region, "abc"))
    for other in others:
        if len(zones) > 1:
            break
        zones.add(other)
    return sorted(zones)


def build_cluster(app: App, cluster: Cluster, *, account: str | None) -> ClusterStacks:
    """Put a checked cluster's stacks into `app`.

    Args:
        app: The app.
        cluster: As `load_cluster` gives it.
        account: Account id, or None to leave it to the deployment.
    """
    place = {"account": account, "zones": zones_of(cluster)}
    network = NetworkStack(app, cluster=cluster, **place)
    identity = IdentityStack(app, cluster=cluster, **place)
    state = StateStack(app, cluster=cluster, network=network, **place) if cluster.shares_state else None
    engines = EnginesStack(app, cluster=cluster, network=network, identity=identity, **place)
    router = RouterStack(app, cluster=cluster, network=network, identity=identity, state=state, **place)
    # A router has nothing to serve, and is not ready, before there are engines.
    router.add_stack_dependency(engines)
    observability = ObservabilityStack(app, cluster=cluster, identity=identity, router=router, **place)
    return ClusterStacks(network, identity, state, engines, router, observability)
