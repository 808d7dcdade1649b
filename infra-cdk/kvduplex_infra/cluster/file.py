"""From a YAML file to a checked `Cluster`, with errors that name file, key, value, reason and the nearest choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvduplex_infra.cluster.fit import problems
from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.errors import ClusterFileError
from kvduplex_transfer.strictyaml import parse_yaml

__all__ = ["load_cluster", "parse_cluster"]


def load_cluster(path: Path, *, now: datetime) -> Cluster:
    """Read and check a cluster file; a manifest it names is looked for beside it.

    Raises:
        ClusterFileError: It cannot be read, or something in it is wrong; every fault on a line of its own.
    """
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))) or "none"
        raise ClusterFileError(f"{path}: {error.strerror}; cluster files in {path.parent}: {known}") from error
    except UnicodeDecodeError as error:
        raise ClusterFileError(f"{path}: not UTF-8: {error}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark is not None else ""
        raise ClusterFileError(f"{path}:{line} not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(values, dict):
        raise ClusterFileError(f"{path}: holds no mapping of keys to values; start from one of clusters/*.yaml")
    return parse_cluster(values, where=str(path), now=now)


def parse_cluster(values: dict[str, Any], *, where: str, now: datetime) -> Cluster:
    """Check `values`, which came from `where`.

    Raises:
        ClusterFileError: As `load_cluster`.
    """
    try:
        cluster = Cluster.model_validate(values)
    except ValidationError as error:
        lines = [_line(details) for details in error.errors(include_url=False)]
        raise ClusterFileError("\n".join(f"{where}: {line}" for line in lines)) from error
    if found := problems(cluster, now=now):
        raise ClusterFileError("\n".join(f"{where}: {problem}" for problem in found))
    return cluster


def _line(details: ErrorDetails) -> str:
    # Pydantic adds the name of a union's member to the place; a person looks for the key in the file.
    place = [part for part in details["loc"] if part not in _UNION_MEMBERS]
    key = ".".join(str(part) for part in place)
    if details["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(place)}"
    if details["type"] == "missing":
        return f"{key}: missing, and it has no default"
    message = details["msg"].removeprefix("Value error, ")
    if not key:
        return message
    seen = f", got {details['input']!r:.80}" if isinstance(details["input"], str | int | float | None) else ""
    return f"{key}: {message[0].lower()}{message[1:]}{seen}"


_UNION_MEMBERS = frozenset({"on_demand", "reservation", "block", "constrained-str", "literal['generate']"})


def _suggestion(place: list[int | str]) -> str:
    section: type[BaseModel] = Cluster
    for part in place[:-1]:
        section = next(_sections(section, str(part)), section)
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(place[-1]), known, n=1)
    return f", did you mean {close[0]}?" if close else f"; known keys: {', '.join(known)}"


def _sections(model: type[BaseModel], key: str) -> Iterator[type[BaseModel]]:
    """Models that key `key` of `model` may hold."""
    pending: list[Any] = [model.model_fields[key].annotation] if key in model.model_fields else []
    while pending:
        candidate = pending.pop(0)
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            yield candidate
        pending.extend(get_args(candidate))
