"""The shipped recipes of both accelerators, and a readable form of what they start."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from kvduplex_gpu.backend import GpuBackend, gpu_recipes
from kvduplex_neuron.backend import NeuronBackend, neuron_recipes
from kvduplex_transfer.interface import EnginePlan
from kvduplex_transfer.recipes import Recipe

ADDRESS = "10.0.1.10"
CATALOGUES = {"neuron": neuron_recipes(), "gpu": gpu_recipes()}
BACKENDS: dict[str, NeuronBackend | GpuBackend] = {
    "neuron": NeuronBackend(interpreter="python3"),
    "gpu": GpuBackend(interpreter="python3"),
}


def rendered(plan: EnginePlan) -> str:
    """One setting a line, so that a difference shows what changed."""
    lines = [f"[{plan.name}] {plan.url}", f"ports: {dict(plan.ports)}"]
    lines += [f"{name}={shlex.quote(value)}" for name, value in sorted(plan.environment.items())]
    arguments = [shlex.quote(argument) for argument in plan.argv]
    return "\n".join([*lines, *" ".join(arguments).replace(" --", "\n  --").splitlines()]) + "\n"


@pytest.fixture
def shipped() -> dict[str, Recipe]:
    """Every shipped recipe by name."""
    recipes = [catalogue.load(name) for catalogue in CATALOGUES.values() for name in catalogue.names]
    return {recipe.name: recipe for recipe in recipes}


@pytest.fixture
def plans() -> Callable[[Recipe], list[EnginePlan]]:
    """Plans of the first two engines, at most, of each role of a recipe."""

    def plan(recipe: Recipe) -> list[EnginePlan]:
        addressed = recipe.overridden({"advertised_host": ADDRESS})
        backend = BACKENDS[recipe.backend]
        found = []
        for role in addressed.roles():
            engines = min(2, int(addressed.options(role).get("engines", 1)))
            found += [backend.engine_plan(addressed, role, index) for index in range(engines)]
        return found

    return plan


@pytest.fixture
def render() -> Callable[[EnginePlan], str]:
    """The readable form."""
    return rendered
