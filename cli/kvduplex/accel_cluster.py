"""A cluster, or one host's part of one, from a recipe: from wishes to plans. Pure, but for reading the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvduplex.errors import UsageError
from kvduplex_gpu.backend import GpuBackend, gpu_recipes
from kvduplex_neuron.backend import NeuronBackend, neuron_recipes
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.interface import EnginePlan, Role, TransferBackend
from kvduplex_transfer.recipes import Catalogue, Recipe, Topology

__all__ = ["AccelCluster", "AccelPlan", "HostRole", "backend_for", "catalogue_of", "plan_cluster"]

_LOOPBACK = "127.0.0.1"
_LEASES_SINCE = Version("0.29")
"""First vLLM whose NIXL connector the leased one is built on."""


class HostRole(StrEnum):
    """What this host does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelCluster:
    """A user's wishes.

    Attributes:
        backend: Accelerator.
        recipe: Name or file of the recipe.
        role: What this host does.
        router_elsewhere: Whether the router runs on another host.
        advertise: Address at which peers and the router reach this host; None to choose one.
        address: This host's own address, for when one must be chosen.
        model: Folder or hub id in place of the recipe's.
        common: Settings on top of the recipe's, for both roles.
        settings: Settings on top of those, of each role.
    """

    backend: Literal["neuron", "gpu"]
    recipe: str
    role: HostRole = HostRole.BOTH
    router_elsewhere: bool = False
    advertise: str | None = None
    address: str = _LOOPBACK
    model: str | None = None
    common: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[Role, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AccelPlan:
    """What this host is to run.

    Attributes:
        recipe: The recipe with every wish in it.
        plans: Its engines here, prefill first.
        router_here: Whether the router runs here, too.
    """

    recipe: Recipe
    plans: tuple[EnginePlan, ...]
    router_here: bool

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles with engines here."""
        return tuple(dict.fromkeys(plan.role for plan in self.plans))

    @property
    def ready_timeout_s(self) -> float:
        """Longest time that any engine may take to become ready, in seconds."""
        return max(float(plan.environment["VLLM_ENGINE_READY_TIMEOUT_S"]) for plan in self.plans)

    @property
    def model_name(self) -> str:
        """What requests give as ``model``."""
        named = self.recipe.options(self.roles[0]).get("served_model_name")
        return str(named) if named else self.recipe.model


def catalogue_of(backend: str) -> Catalogue:
    """The recipes of an accelerator."""
    return neuron_recipes() if backend == "neuron" else gpu_recipes()


def backend_for(recipe: Recipe, roles: tuple[Role, ...]) -> TransferBackend:
    """The backend that a recipe's engines run on, with their transport."""
    if recipe.backend == "neuron":
        return NeuronBackend()
    from kvduplex_gpu.options import GpuOptions  # noqa: PLC0415 - only needed to read the transport

    options = GpuOptions.parse(recipe.options(roles[0]), where=f"recipe {recipe.name}, {roles[0]}")
    return GpuBackend(transport=options.transport)


def plan_cluster(wishes: AccelCluster) -> AccelPlan:
    """Plan the engines of this host.

    Raises:
        UsageError: The recipe is unknown, another backend's, needs another role, or a setting does not fit it.
    """
    if wishes.model == "":
        raise UsageError("--model: is empty; give a folder or a hub id, or leave it out for the recipe's own")
    try:
        recipe = catalogue_of(wishes.backend).load(wishes.recipe)
        roles = _roles(recipe, wishes.role)
        recipe = _with_wishes(recipe, wishes, roles)
        _refuse_leases_on_old_lines(recipe, roles)
        backend = backend_for(recipe, roles)
        plans = [backend.engine_plan(recipe, role, index) for role in roles for index in range(_engines(recipe, role))]
    except ConfigError as error:
        raise UsageError(str(error)) from error
    whole = set(roles) == set(recipe.roles())
    return AccelPlan(recipe, tuple(plans), router_here=whole and not wishes.router_elsewhere)


def _roles(recipe: Recipe, wanted: HostRole) -> tuple[Role, ...]:
    if recipe.topology is Topology.REPLICAS:
        if wanted is not HostRole.BOTH:
            raise UsageError(f"--role {wanted}: recipe {recipe.name} has plain replicas only; leave --role out")
        return (Role.DECODE,)
    if wanted is not HostRole.BOTH:
        return (Role(wanted.value),)
    if not recipe.hosts.both_roles_fit:
        raise UsageError(
            f"recipe {recipe.name} needs a host for each role: start `--role prefill` on one and `--role decode` on "
            "the other, and `kvduplex router` over both"
        )
    return recipe.roles()


def _with_wishes(recipe: Recipe, wishes: AccelCluster, roles: tuple[Role, ...]) -> Recipe:
    changed = recipe.overridden(dict(wishes.common), model=wishes.model)
    for role in roles:
        changed = changed.model_copy(update={role.value: {**getattr(changed, role.value), **_own(wishes, role)}})
    return changed.overridden({"advertised_host": _address(changed, wishes, roles)})


def _refuse_leases_on_old_lines(recipe: Recipe, roles: tuple[Role, ...]) -> None:
    leased = any(recipe.options(role).get("connector") == ConnectorKind.LEASED for role in roles)
    limits = [Version(each.version) for each in SpecifierSet(recipe.stack.vllm) if each.operator == "<"]
    if leased and limits and min(limits) <= _LEASES_SINCE:
        raise UsageError(
            f"recipe {recipe.name} runs vLLM {recipe.stack.vllm}, and leases need {_LEASES_SINCE} or newer; "
            "use `--connector stock`, or a recipe of a newer line"
        )


def _own(wishes: AccelCluster, role: Role) -> Mapping[str, Any]:
    return wishes.settings.get(role, {})


def _address(recipe: Recipe, wishes: AccelCluster, roles: tuple[Role, ...]) -> str:
    if wishes.advertise is not None:
        return wishes.advertise
    named = recipe.options(roles[0]).get("advertised_host")
    if named is not None:
        return str(named)
    alone = set(roles) == set(recipe.roles()) and not wishes.router_elsewhere
    return _LOOPBACK if alone else wishes.address


def _engines(recipe: Recipe, role: Role) -> int:
    engines = recipe.options(role).get("engines", 1)
    return max(engines, 1) if isinstance(engines, int) else 1  # anything else is refused by the first engine's plan
