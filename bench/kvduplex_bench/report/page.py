"""One HTML page with everything in it: figures inline, no script, nothing fetched."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvduplex_bench.multiturn.checks import checks
from kvduplex_bench.multiturn.results import Cell, Results
from kvduplex_bench.multiturn.workload import Arm

__all__ = ["page"]

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}table{border-collapse:collapse;font-size:13px}
th,td{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}
th:first-child,td:first-child,td.text,th.text{text-align:left}figure{margin:1rem 0}svg{max-width:100%;height:auto}
.partial{border:2px solid #D55E00;padding:.6rem 1rem}.no{font-weight:bold;color:#a33c00}
.wide{overflow-x:auto}figcaption{font-size:13px;color:#555}
"""
_CAPTIONS: Final = {
    "ttft": "Time to first token against prompt length. Points are medians over repeats, bars their range.",
    "prefill-split": "Where a prefill request's time went, from the engines' own metrics.",
    "reuse-over-time": "Above: each counted turn's share of prompt tokens that were not computed. Below: the plans of "
    "the router's replies.",
}
_HEADINGS: Final = (
    "prefix (tokens)", "arm", "turns", "TTFT p50", "p90", "p99", "ITL p50", "p99", "E2E p50", "p99", "recompute",
    "transfer", "claim", "queue", "pulled tokens", "MB moved", "errors",
)  # fmt: skip


def page(results: Results, figures: Mapping[str, str]) -> str:
    """The page.

    Args:
        results: The run.
        figures: SVG documents by name.
    """
    parts = [f"<h1>Multi-turn benchmark</h1><p>{html.escape(_lead(results))}</p>", _partial(results), _checks(results)]
    parts += [_figure(name, svg) for name, svg in figures.items()]
    parts += [_table(results, setting) for setting in results.settings]
    parts += [_workload(results), _provenance(results)]
    title = "<title>kvduplex: multi-turn benchmark</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _lead(results: Results) -> str:
    return (
        "The same conversations with and without KV flowing back from decode to prefill. Times to first token, between "
        "tokens and to the end are taken at the client's socket; prefill's parts are the engines' own metrics, means "
        f"over counted turns. Record: {results.path.name}."
    )


def _partial(results: Results) -> str:
    if results.complete:
        return ""
    return '<p class="partial"><b>Partial.</b> The run was stopped before all of it was played.</p>'


def _checks(results: Results) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(check.what)}</td><td>{html.escape(check.seen)}</td><td>{html.escape(check.bar)}</td>"
        f'<td class="{"yes" if check.holds else "no"}">{"holds" if check.holds else "FAILS"}</td></tr>'
        for check in checks(results)
    )
    head = "<tr><th>question</th><th>seen</th><th>bar</th><th></th></tr>"
    return f"<h2>What was asked of it</h2><table>{head}{rows}</table>"


def _figure(name: str, svg: str) -> str:
    drawing = svg[svg.index("<svg") :]  # without XML declaration and document type
    return f"<figure>{drawing}<figcaption>{html.escape(_CAPTIONS[name])}</figcaption></figure>"


def _table(results: Results, setting: str) -> str:
    cells = [results.cell(setting, prefix, arm) for prefix in results.prefixes(setting) for arm in Arm]
    rows = "".join(_row(cell) for cell in cells if cell)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in _HEADINGS)
    return (
        f"<h2>{html.escape(setting)}</h2><p>Times in ms.</p>"
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
    )


def _row(cell: Cell) -> str:
    values: list[str] = [f"{cell.prefix_tokens:,}", str(cell.arm), str(len(cell.turns))]
    values += [_ms(value) for value in (cell.ttft.p50, cell.ttft.p90, cell.ttft.p99)]
    values += [_ms(value) for value in ((cell.itl.p50, cell.itl.p99) if cell.itl else (None, None))]
    values += [_ms(value) for value in (cell.e2e.p50, cell.e2e.p99)]
    split, requests = cell.split, cell.counted.requests
    parts = (split.recompute_s, split.transfer_s, split.claim_s, split.queue_s) if split else (None,) * 4
    values += [_ms(value) for value in parts]
    pulled = f"{cell.counted.pulled_tokens / requests:,.0f}" if requests else "-"
    values += [pulled, f"{cell.pulled_bytes_per_turn / 1e6:.1f}", str(cell.errors)]
    return "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in values) + "</tr>"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:,.1f}"


def _workload(results: Results) -> str:
    return f"<h2>Workload</h2>{_pairs(results.runs[-1]['workload'] if results.runs else {})}"


def _provenance(results: Results) -> str:
    hidden = {"kind", "workload", "format"}
    sittings = "".join(_pairs({k: v for k, v in run.items() if k not in hidden}) for run in results.runs)
    rates = {
        f"bandwidth, {setting}": ", ".join(f"{size / 1e6:.1f} MB at {rate / 1e9:.2f} GB/s" for size, rate in reads)
        for setting, reads in results.bandwidth.items()
    }
    return f"<h2>Provenance</h2>{sittings}{_pairs(rates)}"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(f'<tr><td>{html.escape(k)}</td><td class="text">{_value(v)}</td></tr>' for k, v in values.items())
    return f"<table>{rows}</table>"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"{html.escape(str(k))}: {html.escape(str(v))}" for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return html.escape(" ".join(map(str, value)))
    return html.escape(value if isinstance(value, str) else json.dumps(value))
