"""Tables, JSON lines and plots of a comparison."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

from kvduplex_bench.routing.churn import ChurnResult
from kvduplex_bench.routing.rolling import RollingResult
from kvduplex_bench.routing.run import Comparison, Result
from kvduplex_bench.routing.stats import percentile

__all__ = ["as_lines", "churn_line", "churn_table", "plot", "provenance", "rolling_line", "rolling_table", "table"]

_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#8C6D1F", "#7A7A7A")
_STYLES: Final = {"kvduplex": "-", "vllm-router": "--"}
_POINTS: Final = 200


def table(results: Sequence[Result]) -> Table:
    """One row an arm, in the order they ran."""
    first = results[0].comparison
    rate = f"{results[0].rate:.2f} conversations/s" if results[0].rate else "closed loop"
    found = Table(title=f"{first.trace.name} over {first.fleet.name}, {first.timing}, {rate}")
    for heading in (
        "arm", "requests", "failed", "cached", "TTFT mean (s)", "p50", "p95", "E2E mean (s)", "tokens/s", "requests/s",
        "late (ms)",
    ):  # fmt: skip
        found.add_column(heading, justify="left" if heading == "arm" else "right")
    if not all(result.summary.believable(first.time_scale) for result in results):
        found.caption = "!: the machine was too busy for the simulated engines; run that arm again"
    for result in results:
        each = result.summary
        found.add_row(
            result.arm.name, str(each.requests), str(each.failed), f"{each.cached_share:.1%}",
            f"{each.ttft_mean_s:.3f}", f"{each.ttft_p50_s:.3f}", f"{each.ttft_p95_s:.3f}", f"{each.e2e_mean_s:.2f}",
            f"{each.output_tokens_per_s:.0f}", f"{each.requests_per_s:.2f}", _late(result),
        )  # fmt: skip
    return found


def churn_table(result: ChurnResult) -> Table:
    """What a fleet in motion did to clients."""
    deeds = Counter(deed.what for deed in result.deeds)
    good = [each.ttft_s for each in result.played if not each.error]
    return _facts(
        f"{result.arm.name}, engines in motion",
        {
            "deeds": _kinds(deeds) or "none",
            "answered": str(len(good)),
            "failed": _kinds(result.failed) or "0",
            "streams that broke with a killed engine": str(result.broken_by_kill),
            "requests that waited there (502)": str(result.lost_by_kill),
            "TTFT mean, p95 (s)": f"{sum(good) / max(len(good), 1):.3f}, {percentile(good, 0.95):.3f}",
        },
    )


def churn_line(result: ChurnResult, comparison: Comparison, facts: Mapping[str, Any]) -> str:
    """The same as one JSON line."""
    good = [each.ttft_s for each in result.played if not each.error]
    value = {
        **facts, "bench": "churn", "arm": result.arm.name, "trace": comparison.trace.name, "load": comparison.load,
        "seconds": comparison.seconds, "answered": len(good), "failed": result.failed,
        "failures": result.failures, "broken_by_kill": result.broken_by_kill, "lost_by_kill": result.lost_by_kill,
        "ttft_p95_s": percentile(good, 0.95),
        "deeds": [asdict(deed) for deed in result.deeds],
    }  # fmt: skip
    return json.dumps(value) + "\n"


def rolling_table(result: RollingResult) -> Table:
    """What restarts of routers did to clients and handles."""
    good = [each.ttft_s for each in result.played if not each.error]
    drains = [each.drain_s for each in result.restarts]
    return _facts(
        f"{result.arm.name}, two routers restarted in turns",
        {
            "restarts": str(len(result.restarts)),
            "drain mean, longest (s)": f"{sum(drains) / len(drains):.1f}, {max(drains):.1f}",
            "answered": str(result.answered),
            "failed": _kinds(result.failed) or "0",
            "sent to the other router": f"{result.moved.refused} refused, {result.moved.closed} on a closed connection",
            "plans": _kinds(result.plans),
            "turns with plan pull": f"{result.plans['pull'] / result.answered:.1%}",
            "of turns after a first": f"{result.pulled / max(result.later, 1):.1%}",
            "handles used, more than once": f"{result.handles.used}, {result.handles.twice}",
            "claims refused": _kinds(result.handles.refused) or "0",
            "TTFT mean, p95 (s)": f"{sum(good) / len(good):.3f}, {percentile(good, 0.95):.3f}",
        },
    )


def rolling_line(result: RollingResult, comparison: Comparison, facts: Mapping[str, Any]) -> str:
    """The same as one JSON line."""
    good = [each.ttft_s for each in result.played if not each.error]
    value = {
        **facts, "bench": "rolling", "arm": result.arm.name, "trace": comparison.trace.name,
        "fleet": comparison.fleet.name, "load": comparison.load, "seconds": comparison.seconds,
        "answered": result.answered, "failed": result.failed, "failures": result.failures, "plans": result.plans,
        "later": result.later, "pulled": result.pulled,
        "moved": asdict(result.moved), "handles": asdict(result.handles), "ttft_p95_s": percentile(good, 0.95),
        "restarts": [asdict(each) for each in result.restarts],
    }  # fmt: skip
    return json.dumps(value) + "\n"


def _facts(title: str, rows: Mapping[str, str]) -> Table:
    found = Table("", "", title=title)
    for name, value in rows.items():
        found.add_row(name, value)
    return found


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def _late(result: Result) -> str:
    mark = "" if result.summary.believable(result.comparison.time_scale) else " !"
    return f"{result.summary.late_s * 1000:.1f}{mark}"


def provenance(**more: object) -> dict[str, Any]:
    """Where and when."""
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    return {"bench": "routing", "date": time.strftime("%Y-%m-%d"), **machine, **more}


def as_lines(results: Sequence[Result], facts: Mapping[str, Any]) -> str:
    """One JSON object an arm, with its sums, what failed, and TTFT at every hundredth."""
    lines = []
    for result in results:
        compared = result.comparison
        begin_s = 0.0 if compared.trace.closed else compared.warm_up
        first = [each.ttft_s for each in result.played if not each.error and each.asked >= begin_s]
        lines.append(
            json.dumps(
                {
                    **facts,
                    "trace": compared.trace.name,
                    "fleet": compared.fleet.name,
                    "timing": compared.timing,
                    "load": compared.load,
                    "seconds": compared.seconds,
                    "warm_up": compared.warm_up,
                    "time_scale": compared.time_scale,
                    "rate": result.rate,
                    "arm": result.arm.name,
                    **asdict(result.summary),
                    "errors": result.errors,
                    "ttft_s": [round(percentile(first, at / 100), 4) for at in range(1, 101)],
                }
            )
        )
    return "".join(line + "\n" for line in lines)


def plot(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Plots of JSON lines: the distribution of TTFT and the cached share, a file for each trace and fleet.

    Returns:
        The files written, PNG and SVG.
    """
    written: list[Path] = []
    for trace, fleet in dict.fromkeys((row["trace"], row["fleet"]) for row in rows):
        chosen = [row for row in rows if (row["trace"], row["fleet"]) == (trace, fleet)]
        figure = _figure(chosen, f"{trace} over {fleet}")
        for suffix in ("png", "svg"):
            written.append(folder / f"routing-{trace}-{fleet.replace(' ', '-')}.{suffix}")
            figure.savefig(written[-1], dpi=150)
    return written


def _figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "kvduplex"}):
        figure = Figure(figsize=(9.5, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for row, colour in zip(rows, _COLOURS, strict=False):
            style = _STYLES.get(row["arm"].partition(" ")[0], ":")
            left.plot(row["ttft_s"], range(1, 101), style, color=colour, label=row["arm"], linewidth=1.6)
        left.set_xscale("log")
        left.set(xlabel="time to first token (s)", ylabel="requests answered by then (%)", ylim=(0, 100))
        left.grid(alpha=0.3, which="both")
        left.legend(fontsize=7.5, loc="lower right")
        names = [row["arm"] for row in rows][::-1]
        shares = [100 * row["cached_share"] for row in rows][::-1]
        bars = right.barh(names, shares, color=[*_COLOURS[: len(rows)]][::-1])
        right.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        right.set(xlabel="prompt tokens not computed (%)", xlim=(0, 110))
        first = rows[0]
        facts = f"{first['timing']}, simulated engines, {first['date']}"
        rate = f"{first['load']:.0%} load, {first['rate']:.2f} conversations/s, " if first["rate"] else "closed loop, "
        figure.suptitle(f"{title}: {rate}{facts}", fontsize=9.5)
    return figure
