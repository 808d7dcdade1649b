"""Every check that the doctor can make is described on its page."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = ("transfer/kvduplex_transfer", "neuron/kvduplex_neuron", "gpu/kvduplex_gpu")
SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
COMMANDS = [ROOT / "cli" / "kvduplex" / f"{name}.py" for name in ("doctor_peer", "doctor_transfer", "accel_fit")]
MADE_BY = {"ok", "warn", "fail"}


def checks() -> Iterator[str]:
    """First argument of every call that makes a finding, where it is a plain string."""
    for path in (*SOURCES, *COMMANDS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MADE_BY:
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value


def test_every_check_is_described() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    found = set(checks())
    assert len(found) > 50, "the search no longer finds the checks"
    assert not sorted(check for check in found if f"`{check}`" not in page)
