"""The command that times decisions runs and says what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvduplex_router.routing.timing import main


def test_it_measures_a_small_fleet(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engines", "4", "--blocks", "4000", "--requests", "5", "--tokenizer", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "blocks held, all engines together" in lines[1]
    assert int(lines[1].split()[-1].replace(",", "")) == 4 * 100 + 8 * 400 + 400
    assert any(line.startswith("decision, both together") and "p50" in line for line in lines)
    assert any(line.startswith("render, tokenise, hash turn 30") for line in lines)
