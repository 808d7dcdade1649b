"""A YAML file with the line of every key, so that errors can point at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from kvduplex_router.errors import ConfigError

__all__ = ["ConfigDocument"]

Location = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class ConfigDocument:
    """Values of a configuration file, and where they stand in it."""

    values: dict[str, Any]
    name: str = ""
    lines: dict[Location, int] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> Self:
        """What stands for no file."""
        return cls({})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: It is missing, is not YAML, or is not a mapping at the top.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            values = yaml.safe_load(text)
            lines: dict[Location, int] = {}
            _collect(node, (), lines, str(path))
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise ConfigError(f"{path}: nested without end; an alias stands inside what it names") from None
        if values is None:
            return cls({}, str(path))
        if not isinstance(values, dict):
            raise ConfigError(f"{path}:1: expected a mapping of keys at the top, got {type(values).__name__}")
        return cls(values, str(path), lines)

    def place(self, location: Location) -> str:
        """``FILE:LINE: `` of the nearest key at or above `location`; empty when there is no file."""
        if not self.name:
            return ""
        for end in range(len(location), 0, -1):
            if (line := self.lines.get(location[:end])) is not None:
                return f"{self.name}:{line}: "
        return f"{self.name}: "


def _collect(node: yaml.Node | None, at: Location, lines: dict[Location, int], name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(f"{name}:{line}: {key.value}: given twice; the first would be lost")
            seen.add(key.value)
            lines[(*at, key.value)] = line
            _collect(value, (*at, key.value), lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*at, index)] = value.start_mark.line + 1
            _collect(value, (*at, index), lines, name)
