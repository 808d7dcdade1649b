"""What a cluster costs an hour: machines by the price list, the rest by published prices."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvduplex.ec2.pricing import Cost, CostLine, hourly_price
from kvduplex_infra.cluster.model import Cluster

if TYPE_CHECKING:
    from types_boto3_pricing import PricingClient

__all__ = ["cost_of", "machines_of"]


def machines_of(cluster: Cluster) -> Counter[str]:
    """Machines of a cluster by type; routers in containers are none."""
    machines: Counter[str] = Counter()
    if cluster.router.platform == "ec2":
        machines[cluster.router.instance_type] += cluster.router.count
    for fleet in cluster.fleets.values():
        machines[fleet.instance_type] += fleet.count
    return machines


def cost_of(cluster: Cluster, *, pricing: PricingClient) -> Cost:
    """On-demand price of all machines; a reservation or a block is paid apart.

    Raises:
        AwsError: The price list cannot be asked.
    """
    prices = {name: hourly_price(name, region=cluster.region, pricing=pricing) for name in machines_of(cluster)}
    return Cost(tuple(CostLine(name, count, prices[name]) for name, count in sorted(machines_of(cluster).items())))
