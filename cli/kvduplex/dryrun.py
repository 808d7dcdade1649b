"""Shows what would run, in a form that a shell can run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from kvduplex.supervise import Unit

__all__ = ["as_json", "as_shell"]


def as_shell(units: Sequence[Unit]) -> str:
    """Each unit as a comment and a command with its environment, quoted; blank lines between."""
    return "\n\n".join(f"# {unit.name}: {unit.url}, log {unit.log}\n{_command(unit)}" for unit in units)


def as_json(units: Sequence[Unit]) -> str:
    """The same as one JSON object on one line."""
    return json.dumps({"event": "plan", "units": [_described(unit) for unit in units]})


def _command(unit: Unit) -> str:
    words = ["env", *(f"{key}={value}" for key, value in sorted(unit.environment.items()))] if unit.environment else []
    lines = [*map(shlex.quote, words[:1]), *map(shlex.quote, words[1:]), *_grouped(unit.argv)]
    folder = [f"mkdir -p {shlex.quote(str(unit.scratch))} &&"] if unit.scratch else []
    return " \\\n  ".join([*folder, *lines])


def _grouped(argv: Sequence[str]) -> list[str]:
    """One line for the program, then one for each flag with its value."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines if line]


def _described(unit: Unit) -> dict[str, object]:
    return {
        "name": unit.name,
        "argv": list(unit.argv),
        "environment": dict(unit.environment),
        "url": unit.url,
        "ports": dict(unit.ports),
        "log": str(unit.log),
    }
