"""A run's tables in Markdown, for documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvduplex_bench.multiturn.checks import checks
from kvduplex_bench.multiturn.results import Cell, Results
from kvduplex_bench.multiturn.workload import Arm
from kvduplex_bench.stats import percentile

__all__ = ["markdown"]

_HEADINGS: Final = (
    "prefix", "arm", "TTFT ms (range)", "recompute", "transfer", "claim", "queue", "pulled tokens", "MB", "ITL p50 ms",
)  # fmt: skip


def markdown(results: Results, source: str) -> str:
    """Checks, then a table a setting.

    Args:
        results: The run.
        source: One line of provenance.
    """
    judged = ((c.what, c.seen, c.bar, "yes" if c.holds else "**no**") for c in checks(results))
    parts = [source, _table(("question", "seen", "bar", "holds"), judged)]
    for setting in results.settings:
        cells = [results.cell(setting, prefix, arm) for prefix in results.prefixes(setting) for arm in Arm]
        parts += [f"**{setting}**", _table(_HEADINGS, (_row(cell) for cell in cells if cell))]
    return "\n\n".join(parts) + "\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(cell: Cell) -> list[str]:
    times = [value * 1e3 for value in cell.repeat_ttft_s]
    shown = f"{percentile(times, 50):,.0f} ({min(times):,.0f} to {max(times):,.0f})"
    itl = f"{cell.itl.p50 * 1e3:.1f}" if cell.itl else "-"
    if (split := cell.split) is None:
        return [f"{cell.prefix_tokens:,}", str(cell.arm), shown, *["-"] * 6, itl]
    parts = (split.recompute_s, split.transfer_s, split.claim_s, split.queue_s)
    moved = [f"{cell.counted.pulled_tokens / cell.counted.requests:,.0f}", f"{cell.pulled_bytes_per_turn / 1e6:.1f}"]
    return [f"{cell.prefix_tokens:,}", str(cell.arm), shown, *(f"{part * 1e3:,.1f}" for part in parts), *moved, itl]
