"""What each shipped recipe starts, held word for word.

After a change that is meant, write the files anew and read the difference::

    KVDUPLEX_WRITE_GOLDEN=1 pytest tests/unit/recipes/test_golden.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvduplex_gpu.backend import gpu_recipes
from kvduplex_neuron.backend import neuron_recipes
from kvduplex_transfer.interface import EnginePlan
from kvduplex_transfer.recipes import Recipe

GOLDEN = Path(__file__).parent / "golden"
NAMES = [*neuron_recipes().names, *gpu_recipes().names]


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_environment_are_the_held_ones(
    name: str,
    shipped: dict[str, Recipe],
    plans: Callable[[Recipe], list[EnginePlan]],
    render: Callable[[EnginePlan], str],
) -> None:
    actual = "\n".join(render(plan) for plan in plans(shipped[name]))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("KVDUPLEX_WRITE_GOLDEN"):
        path.write_text(actual)
        pytest.fail(f"{path.name} was written; run again without KVDUPLEX_WRITE_GOLDEN")
    assert actual == path.read_text()


def test_every_held_file_belongs_to_a_recipe() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(NAMES)
