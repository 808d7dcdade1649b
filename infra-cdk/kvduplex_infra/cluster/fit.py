"""What no single key can show: whether type, region, zone, interfaces, memory and roles fit each other. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from datetime import datetime, timedelta

from kvduplex.node.config import Backend
from kvduplex_infra.cluster.capacity import CapacityBlock, OnDemand
from kvduplex_infra.cluster.container import Container
from kvduplex_infra.cluster.memory import instance_memory_gib, weights_gib
from kvduplex_infra.cluster.model import Cluster, Fleet
from kvduplex_infra.cluster.recipes import read_recipe, recipe_names
from kvduplex_infra.cluster.regions import OFFERINGS, ZONES, regions_offering
from kvduplex_infra.errors import ClusterFileError
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.hostchecks.efa_layout import EfaLayout, network_interfaces
from kvduplex_transfer.hostchecks.instances import INSTANCE_TYPES, Accelerator
from kvduplex_transfer.recipes import Topology

__all__ = ["BLOCK_RECLAIM", "notes", "problems"]

BLOCK_RECLAIM = timedelta(minutes=30)
"""EC2 starts to reclaim a Capacity Block's instances this long before its end (EC2 user guide)."""

_GENERAL_PURPOSE = re.compile(r"^[cmrt]\d+[a-fh-z]*\.")
"""Families that routers run on; the images are for x86, so Graviton (a ``g`` behind the number) is left out."""

_SYSTEM_GIB = 50
"""What an image, logs and compiled graphs take of a root volume, roughly."""

_ACCELERATORS = {
    Backend.NEURON: Accelerator.NEURON,
    Backend.GPU: Accelerator.GPU,
    Backend.HOST: Accelerator.NONE,
}


def problems(cluster: Cluster, *, now: datetime) -> list[str]:
    """Every misfit, as ``key: value reason; nearest valid choice``; empty when the cluster can be built."""
    try:
        found = [*_zones(cluster), *_recipe(cluster), *_routers(cluster), *_model(cluster)]
    except ClusterFileError as error:
        return [str(error)]
    for role, fleet in cluster.fleets.items():
        found += _type(cluster, role, fleet)
        found += _interfaces(role, fleet)
        found += _capacity(cluster, role, fleet, now)
        found += _memory(cluster, role, fleet)
        found += _volume(cluster, role, fleet)
    return found


def _zones(cluster: Cluster) -> Iterator[str]:
    for key, zone in (("zone", cluster.zone), *(("router_zones", zone) for zone in cluster.router_zones)):
        if not zone.startswith(cluster.region):
            yield f"{key}: {zone} is not in region {cluster.region}; nearest: {_nearest_zone(cluster.region, zone)}"
        elif zone[-1] not in ZONES.get(cluster.region, zone[-1]):
            yield f"{key}: {zone} does not exist; {cluster.region} has zones {', '.join(ZONES[cluster.region])}"
    if len(set(cluster.router_zones)) == 1:
        yield (
            f"router_zones: {cluster.router_zones[0]} alone; a load balancer needs two zones, "
            f"e.g. [{', '.join(cluster.region + letter for letter in ZONES.get(cluster.region, 'ab')[:2])}]"
        )


def _nearest_zone(region: str, zone: str) -> str:
    letters = ZONES.get(region, "abc")
    return region + (zone[-1] if zone[-1] in letters else letters[0])


def _type(cluster: Cluster, role: str, fleet: Fleet) -> Iterator[str]:
    key, name = f"{role}.instance_type", fleet.instance_type
    wanted = _ACCELERATORS[cluster.backend]
    usable = [n for n, row in INSTANCE_TYPES.items() if row.accelerator is wanted and row.device_rdma]
    row = INSTANCE_TYPES.get(name)
    if wanted is not Accelerator.NONE and (row is None or row.accelerator is not wanted):
        yield f"{key}: {name} has no device of backend {cluster.backend}; nearest: {_nearest(name, usable)}"
    elif wanted is Accelerator.NONE and row is not None and row.accelerator is not wanted:
        yield f"{key}: {name} with backend host leaves its accelerators idle; nearest: c7i.8xlarge"
    elif row is not None and row.obstacle:
        yield f"{key}: {name} cannot serve: {row.obstacle}; nearest: {_nearest(name, usable)}"
    elif cluster.region not in regions_offering(name) and not cluster.unlisted_offering and name in OFFERINGS:
        offered = ", ".join(OFFERINGS[name])
        yield (
            f"{key}: {name} is not listed in region {cluster.region}; nearest: {offered}. "
            "If EC2 offers it to you there, set unlisted_offering: true"
        )


def _nearest(name: str, choices: list[str]) -> str:
    return (difflib.get_close_matches(name, choices, n=1, cutoff=0.0) or ["none"])[0]


def _interfaces(role: str, fleet: Fleet) -> Iterator[str]:
    row = INSTANCE_TYPES.get(fleet.instance_type)
    cards = (row.efa_interfaces or 0) if row is not None else 0
    if fleet.efa_interfaces is not None and fleet.efa_interfaces > cards:
        yield (
            f"{role}.efa_interfaces: {fleet.efa_interfaces} do not fit {fleet.instance_type}, which has {cards} "
            f"network cards with EFA; nearest: {cards}"
        )
    if fleet.efa_layout is EfaLayout.B and cards == 0:
        yield f"{role}.efa_layout: B needs EFA, and {fleet.instance_type} has none; nearest: A (the default)"
    try:
        network_interfaces(fleet.instance_type, fleet.efa_layout)
    except ConfigError as error:
        yield f"{role}.instance_type: {error}"


def _capacity(cluster: Cluster, role: str, fleet: Fleet, now: datetime) -> Iterator[str]:
    capacity = fleet.capacity
    if isinstance(capacity, OnDemand):
        return
    if capacity.zone != cluster.zone:
        yield (
            f"{role}.capacity.zone: {capacity.zone} is not the engines' zone {cluster.zone}, so nothing could launch "
            f"from {capacity.id}; nearest: zone: {capacity.zone}"
        )
    if isinstance(capacity, CapacityBlock) and capacity.ends - BLOCK_RECLAIM <= now:
        yield (
            f"{role}.capacity.ends: {capacity.ends.isoformat()} is over, or EC2 is reclaiming its instances; "
            "nearest: a block that ends later, or kind: on_demand"
        )


def _memory(cluster: Cluster, role: str, fleet: Fleet) -> Iterator[str]:
    needed, there = weights_gib(cluster.served), instance_memory_gib(fleet.instance_type)
    if needed is None or there is None or needed <= there:
        return
    fitting = [n for n in OFFERINGS if _same_kind(n, cluster) and (instance_memory_gib(n) or 0) >= needed]
    yield (
        f"model.id: {cluster.served.id} needs {needed:.0f} GiB for weights alone, {role}.instance_type "
        f"{fleet.instance_type} leaves {there:.0f} GiB for them; nearest: "
        f"{_nearest(fleet.instance_type, fitting) if fitting else 'a model with fewer bytes per parameter'}"
    )


def _volume(cluster: Cluster, role: str, fleet: Fleet) -> Iterator[str]:
    needed = weights_gib(cluster.served)
    if needed is None or cluster.served.id.startswith("/"):
        return
    least = int(needed + _SYSTEM_GIB) + 1
    if fleet.volume_gib < least:
        yield (
            f"{role}.volume_gib: {fleet.volume_gib} does not hold {needed:.0f} GiB of weights beside the system's "
            f"{_SYSTEM_GIB}; nearest: {least}"
        )


def _same_kind(name: str, cluster: Cluster) -> bool:
    return INSTANCE_TYPES[name].accelerator is _ACCELERATORS[cluster.backend]


def _model(cluster: Cluster) -> Iterator[str]:
    model = cluster.served
    if model.source is None and not model.id.startswith("/") and cluster.network.internet == "none":
        yield (
            f"model.source: {model.id} would come from a hub, and network.internet none reaches none; "
            "nearest: source: s3://BUCKET/PREFIX, or network.internet: nat"
        )


def _recipe(cluster: Cluster) -> Iterator[str]:
    if cluster.recipe is None:
        if cluster.backend is not Backend.HOST:
            yield f"recipe: missing, and backend {cluster.backend} needs one of {_recipes(cluster)}"
        if cluster.prefill is None:
            yield "prefill: missing; give the prefill fleet, or a recipe whose engines do whole turns"
        return
    recipe = read_recipe(cluster.backend, cluster.recipe)
    splits = recipe.topology is Topology.DISAGGREGATED
    if splits and cluster.prefill is None:
        yield f"prefill: missing, and recipe {cluster.recipe} splits roles; give the prefill fleet"
    if not splits and cluster.prefill is not None:
        yield f"prefill: recipe {cluster.recipe} has no prefill/decode split; remove it, decode holds the replicas"
    for role, fleet in cluster.fleets.items():
        if recipe.hosts.instance_types and fleet.instance_type not in recipe.hosts.instance_types:
            yield (
                f"{role}.instance_type: {fleet.instance_type} is none of recipe {cluster.recipe}; "
                f"nearest: {_nearest(fleet.instance_type, list(recipe.hosts.instance_types))}"
            )


def _recipes(cluster: Cluster) -> str:
    return ", ".join(recipe_names(cluster.backend))


def _routers(cluster: Cluster) -> Iterator[str]:
    if cluster.router.container is not None:
        yield from _registry(cluster, cluster.router.container)
        return
    if not _GENERAL_PURPOSE.match(cluster.router.instance_type):
        yield (
            f"router.instance_type: {cluster.router.instance_type} is no x86 type of the families c, m, r and t; "
            "nearest: c7i.xlarge"
        )


def _registry(cluster: Cluster, container: Container) -> Iterator[str]:
    if cluster.network.internet == "none" and container.ecr_region != cluster.region:
        yield (
            f"router.container.image: {container.image.partition('@')[0]} would come from a registry that "
            f"network.internet none does not reach; nearest: a repository in Amazon ECR in {cluster.region}, or "
            "network.internet: nat"
        )


def notes(cluster: Cluster) -> list[str]:
    """What is allowed and yet to be known before deploying."""
    found = []
    if cluster.router.count > 1 and not cluster.shares_state:
        found.append(
            f"state.enabled: false, so {cluster.router.count} routers do not share what they remember: a turn that "
            "meets another router than the one before is computed anew"
        )
    if cluster.replicas:
        found.append(
            "prefill: absent, so KV does not move between engines, and each machine runs one engine of the recipe "
            '(docs/deploy-aws.md, "trn1")'
        )
    if not cluster.alarms.emails:
        found.append("alarms.emails: nobody is told of alarms")
    if cluster.budget is None:
        found.append("budget: missing; nobody is told of costs")
    return found
