"""Between `NodeConfig` and its YAML file, with errors that name file, key, value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvduplex.errors import UsageError
from kvduplex.node.config import NODE_FILE, NODE_VARIABLE, NodeConfig
from kvduplex_transfer.strictyaml import parse_yaml

__all__ = ["NodeConfigError", "dump_node", "load_node", "parse_node", "read_node"]


class NodeConfigError(UsageError):
    """A node configuration is wrong; every line of the message names a place, a key and the remedy."""


def read_node(file: Path, environ: Mapping[str, str]) -> NodeConfig:
    """Read the configuration of this machine from `file`, or of this container from `NODE_VARIABLE`, which goes first.

    Raises:
        NodeConfigError: There is none, or it is wrong.
    """
    if (text := environ.get(NODE_VARIABLE)) is not None:
        return load_node(text, where=f"${NODE_VARIABLE}")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise NodeConfigError(
            f"{file}: {error.strerror}; user data writes it at the first boot, see `cloud-init status --long`"
        ) from error
    except UnicodeDecodeError as error:
        raise NodeConfigError(f"{file}: not UTF-8: {error}; save it as UTF-8") from error
    return load_node(text, where=str(file))


def load_node(text: str, *, where: str = NODE_FILE) -> NodeConfig:
    """Read a node configuration from the text of a YAML file called `where`.

    Raises:
        NodeConfigError: The text is no YAML mapping, or a key or value is wrong.
    """
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        raise NodeConfigError(f"{where}: not YAML: {_yaml_problem(error)}") from error
    if not isinstance(values, dict):
        raise NodeConfigError(f"{where}: holds no mapping of keys to values; see docs/ami.md for an example")
    return parse_node(values, where=where)


def parse_node(values: Mapping[str, Any], *, where: str) -> NodeConfig:
    """Check `values`, which came from `where`.

    Raises:
        NodeConfigError: Each wrong key on a line of its own.
    """
    try:
        return NodeConfig.model_validate(dict(values))
    except ValidationError as error:
        lines = [_line(details) for details in error.errors(include_url=False)]
        raise NodeConfigError("\n".join(f"{where}: {line}" for line in lines)) from error


def dump_node(config: NodeConfig) -> str:
    """YAML text that `load_node` reads back as an equal configuration; defaults are left out."""
    values = config.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"version": config.version, **values}, sort_keys=False, allow_unicode=True)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "cannot be read"
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)


def _line(details: ErrorDetails) -> str:
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(details['loc'])}"
    if details["type"] == "missing":
        return f"{key}: missing, and it has no default"
    message = details["msg"].removeprefix("Value error, ")
    if not key:
        return message
    return f"{key}: {message[0].lower()}{message[1:]}{_seen(details['input'])}"


def _seen(value: object) -> str:
    # Scalars only, and not at length: a mapping of options might hold anything. A URL may hold a password.
    if isinstance(value, str) and "@" in value:
        return ""
    return f", got {value!r:.80}" if isinstance(value, str | int | float | None) else ""


def _suggestion(place: tuple[int | str, ...]) -> str:
    section: type[BaseModel] = NodeConfig
    for part in place[:-1]:
        section = _section(section, str(part)) or section
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(place[-1]), known, n=1)
    return f", did you mean {close[0]}?" if close else f"; known keys: {', '.join(known)}"


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The model of section `key`, optional or not."""
    annotation = model.model_fields[key].annotation if key in model.model_fields else None
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
