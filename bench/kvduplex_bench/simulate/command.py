"""``kvduplex bench simulate``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.simulate.studies import STUDIES, Row, Study

__all__ = ["simulate"]


def simulate(
    study: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(STUDIES)}; repeat for several.")] = None,
    size: Annotated[
        float, typer.Option(min=0.001, max=100, help="Factor on simulated time, and on the conversations of `scale`.")
    ] = 1.0,
    output: Annotated[Path | None, typer.Option(help="Append every row to this file, as JSON lines.")] = None,
) -> None:
    """Simulate fleets faster than real time, from timing profiles with stated sources."""
    console = result_console()
    try:
        for chosen in [_named(name) for name in study or STUDIES]:
            _one(chosen, size, output, console)
    except (BenchError, OSError) as error:
        explain("bench simulate", error)
        raise typer.Exit(1) from error


def _named(name: str) -> Study:
    if name not in STUDIES:
        raise BenchError(f"--study {name}: expected one of {', '.join(STUDIES)}")
    return STUDIES[name]


def _one(study: Study, size: float, output: Path | None, console: Console) -> None:
    began, rows = time.perf_counter(), list[Row]()
    with console.status(study.name) as status:
        for row in study.rows(size):
            rows.append(row)
            status.update(f"{study.name}: {len(rows)} rows")
    table = Table(title=f"{study.name}: {study.question}", caption=f"Assumes: {study.assumes}")
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="left" if isinstance(rows[0][heading], str) else "right")
    for row in rows:
        table.add_row(*(_shown(name, row.get(name, "")) for name in rows[0]))
    console.print(table)
    console.print(f"{time.perf_counter() - began:.0f} s")
    if output is not None:
        facts = {"bench": "simulate", "study": study.name, "size": size, "assumes": study.assumes}
        with output.open("a") as file:
            file.writelines(json.dumps({**facts, **row}) + "\n" for row in rows)


def _shown(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    if isinstance(value, float):
        share = name.endswith(("off_by", "cached"))
        return f"{value:+.1%}" if name.endswith("off_by") else f"{value:.1%}" if share else f"{value:.3g}"
    return str(value)
