"""The `kvduplex bench` commands."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvduplex_bench import cluster as clusters
from kvduplex_bench import smoke as smoke_bench
from kvduplex_bench.claims import claims
from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.leases import leases
from kvduplex_bench.multiturn.command import multiturn
from kvduplex_bench.peers.command import peers
from kvduplex_bench.report.command import plot
from kvduplex_bench.router_cost import router_cost
from kvduplex_bench.router_memory import router_memory
from kvduplex_bench.router_workers import router_workers
from kvduplex_bench.routing.command import routing
from kvduplex_bench.simulate.command import simulate
from kvduplex_bench.transfer import transfer
from kvduplex_bench.tune.command import tune

__all__ = ["app"]

app = typer.Typer(help="Measure clusters, transfers and policies.", no_args_is_help=True, add_completion=False)
app.command()(multiturn)
app.command()(plot)
app.command()(tune)
app.command()(peers)
app.command()(transfer)
app.command()(leases)
app.command()(claims)
app.command("router")(router_cost)
app.command("router-workers")(router_workers)
app.command("router-memory")(router_memory)
app.command()(routing)
app.command()(simulate)


@app.callback()
def bench() -> None:
    """Measure a cluster."""


@app.command()
def smoke(
    url: Annotated[str, typer.Option(help="Router of a running cluster; without it one is started.")] = "",
    prefill: Annotated[
        list[str] | None, typer.Option(help="Prefill engine of that cluster; repeat for several.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=100, help="Least length of turn 2's prompt, in tokens.")] = 1800,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of turns.")] = 7,
    connector: Annotated[str, typer.Option(help="Connector of the started cluster: leased or stock.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write every turn to this file, as JSON lines.")] = None,
) -> None:
    """Time turn 2 with and without reuse, from the prefill engine's own metrics, both arms in one run."""
    console = result_console()
    try:
        with _cluster(url, prefill or [], tokens, connector) as cluster:
            turns = smoke_bench.run(cluster, tokens=tokens, repeats=repeats)
    except BenchError as error:
        explain("bench smoke", error)
        raise typer.Exit(1) from error
    console.print(_table(turns))
    summary = smoke_bench.summarise(turns)
    console.print(
        f"Prefill hop: {summary.ratio:.1f} times faster with reuse "
        f"(median of {summary.pairs} pairs; {summary.ratio_low:.1f} to {summary.ratio_high:.1f})."
    )
    if output is not None:
        output.write_text(smoke_bench.as_json(turns, _provenance(tokens, repeats, connector)))
    if not any(turn.reused_tokens for turn in turns):
        Console(stderr=True).print("[red]bench smoke:[/red] no token was reused; the router's log says why")
        raise typer.Exit(1)


def _cluster(
    url: str, prefill: list[str], tokens: int, connector: str
) -> contextlib.AbstractContextManager[clusters.Cluster]:
    if url:
        if not prefill:
            raise BenchError("--url needs --prefill URL too: the times come from the prefill engines' metrics")
        return contextlib.nullcontext(clusters.Cluster(url.rstrip("/"), tuple(p.rstrip("/") for p in prefill), ()))
    (port,) = clusters.free_ports(1)
    return clusters.started(["--port", str(port), *smoke_bench.engine_arguments(tokens, connector)])


def _table(turns: list[smoke_bench.Turn]) -> Table:
    table = Table(title="Turn 2, prefill engine")
    for heading in ("arm", "prompt tokens", "reused", "computed", "moved (MB)", "hop (ms)"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for turn in turns:
        counts = (turn.prompt_tokens, turn.reused_tokens, turn.computed_tokens)
        table.add_row(turn.arm, *map(str, counts), f"{turn.bytes_moved / 1e6:.2f}", f"{turn.hop_s * 1e3:.1f}")
    return table


def _provenance(tokens: int, repeats: int, connector: str) -> dict[str, Any]:
    return {
        "bench": "smoke",
        "tokens": tokens,
        "repeats": repeats,
        "connector": connector or "default",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
