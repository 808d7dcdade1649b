"""Results as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvduplex_bench.multiturn.checks import checks
from kvduplex_bench.multiturn.results import Cell, Results
from kvduplex_bench.multiturn.workload import Arm

__all__ = ["show"]

_HEADINGS = ("prefix", "arm", "n", "TTFT p50", "p99", "ITL p50", "E2E p50")
_ENGINE_HEADINGS = ("recompute", "transfer", "claim", "queue", "pulled", "MB moved")


def show(results: Results, console: Console) -> None:
    """Print every point, then the checks."""
    for setting in results.settings:
        console.print(_table(results, setting))
    for check in checks(results):
        mark = "[green]holds[/green]" if check.holds else "[red]fails[/red]"
        console.print(f"{mark}  {check.what}: {check.seen} ({check.bar})", highlight=False, soft_wrap=True)
    if not results.complete:
        console.print(
            f"[yellow]Partial:[/yellow] the run in {results.path} is not complete.", highlight=False, soft_wrap=True
        )


def _table(results: Results, setting: str) -> Table:
    table = Table(title=f"{setting}; times in ms, prefill's parts are means")
    for heading in (*_HEADINGS, *_ENGINE_HEADINGS):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for prefix in results.prefixes(setting):
        for arm in Arm:
            if cell := results.cell(setting, prefix, arm):
                table.add_row(*_row(cell))
        table.add_section()
    return table


def _row(cell: Cell) -> list[str]:
    itl = f"{cell.itl.p50 * 1e3:.1f}" if cell.itl else "-"
    seen = [f"{cell.prefix_tokens:,}", cell.arm, str(len(cell.turns)), f"{cell.ttft.p50 * 1e3:,.0f}"]
    seen += [f"{cell.ttft.p99 * 1e3:,.0f}", itl, f"{cell.e2e.p50 * 1e3:,.0f}"]
    if (split := cell.split) is None:
        return [*seen, *["-"] * len(_ENGINE_HEADINGS)]
    parts = [split.recompute_s, split.transfer_s, split.claim_s, split.queue_s]
    requests = cell.counted.requests
    moved = [f"{cell.counted.pulled_tokens / requests:,.0f}", f"{cell.pulled_bytes_per_turn / 1e6:.1f}"]
    return [*seen, *(f"{part * 1e3:,.1f}" for part in parts), *moved]
