"""Finding a recipe by name among those a backend ships, or by path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.recipes.schema import Recipe
from kvduplex_transfer.strictyaml import parse_yaml

__all__ = ["Catalogue"]


class Catalogue:
    """The recipes of one backend.

    Args:
        backend: Its name.
        folder: Where its ``*.yaml`` files lie.
    """

    def __init__(self, backend: str, folder: Path) -> None:
        self._backend = backend
        self._folder = folder

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the shipped recipes, sorted."""
        return tuple(sorted(path.stem for path in self._folder.glob("*.yaml")))

    def load(self, reference: str) -> Recipe:
        """Read a recipe.

        Args:
            reference: A shipped recipe's name, or a path that ends in ``.yaml`` or ``.yml``.

        Raises:
            ConfigError: There is none, it is damaged, or it is another backend's.
        """
        recipe = self._read(self._locate(reference))
        if recipe.backend != self._backend:
            raise ConfigError(
                f"recipe {recipe.name} is for backend {recipe.backend}, not {self._backend}; "
                f"use `kvduplex serve {recipe.backend} --recipe {reference}`"
            )
        return recipe

    def _locate(self, reference: str) -> Path:
        if reference.endswith((".yaml", ".yml")):
            return self._file(reference)
        if reference in self.names:
            return self._folder / f"{reference}.yaml"
        close = difflib.get_close_matches(reference, self.names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known recipes: {', '.join(self.names)}"
        raise ConfigError(f"no recipe {reference!r} for backend {self._backend}; {hint}")

    def _file(self, reference: str) -> Path:
        try:
            path = Path(reference).expanduser()
            found = path.is_file()
        except (OSError, RuntimeError) as error:  # a folder not to be entered; `~` of nobody
            raise ConfigError(f"recipe file {reference} cannot be read: {error}") from error
        if not found:
            raise ConfigError(f"recipe file {reference} does not exist; known recipes: {', '.join(self.names)}")
        return path

    def _read(self, path: Path) -> Recipe:
        try:
            values = parse_yaml(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {path} cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"recipe {path} is not YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"recipe {path} must hold a mapping of keys; docs/neuron.md describes them")
        named: Mapping[str, Any] = {"name": path.stem, **values}
        return Recipe.parse(named, where=f"recipe {path.name}")
