"""The recipes a cluster may name, whichever backend ships them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvduplex.node.config import Backend
from kvduplex_gpu.backend import gpu_recipes
from kvduplex_infra.errors import ClusterFileError
from kvduplex_neuron.backend import neuron_recipes
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.recipes import Catalogue, Recipe

__all__ = ["read_recipe", "recipe_names"]

_CATALOGUES: Mapping[Backend, Callable[[], Catalogue]] = MappingProxyType(
    {Backend.NEURON: neuron_recipes, Backend.GPU: gpu_recipes}
)


def recipe_names(backend: Backend) -> tuple[str, ...]:
    """Recipes of a backend, sorted; the host backend has none."""
    return _CATALOGUES[backend]().names if backend in _CATALOGUES else ()


def read_recipe(backend: Backend, name: str) -> Recipe:
    """Read recipe `name` of `backend`.

    Raises:
        ClusterFileError: There is no such recipe, or its file is damaged.
    """
    if name not in recipe_names(backend):
        known = ", ".join(recipe_names(backend)) or "none; remove the key"
        raise ClusterFileError(f"recipe: {name} is none of backend {backend}; known: {known}")
    try:
        return _CATALOGUES[backend]().load(name)
    except ConfigError as error:
        raise ClusterFileError(f"recipe: {error}") from error
