"""``kvduplex bench plot``: figures and a page from a run's record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.results import load
from kvduplex_bench.report.files import write_report

__all__ = ["plot"]

_RECORD: Final = Path(".bench/multiturn.jsonl")


def plot(
    record: Annotated[Path, typer.Argument(help="What `kvduplex bench multiturn` wrote.")] = _RECORD,
    output: Annotated[
        Path | None, typer.Option(help="Folder for figures and page; default: beside the record.")
    ] = None,
) -> None:
    """Draw a run: figures as PNG and SVG, and one HTML page that needs no network."""
    console = Console(stderr=True)
    try:
        results = load(record)
        written = write_report(results, output or record.parent / record.stem)
    except BenchError as error:
        console.print(f"[red]bench plot:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if not results.complete:
        console.print(
            f"[yellow]Partial:[/yellow] the run in {record} is not complete; figures say so.", highlight=False
        )
    for path in written:
        typer.echo(str(path))
