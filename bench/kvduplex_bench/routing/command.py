"""``kvduplex bench routing``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.processes import unwind_on_sigterm
from kvduplex_bench.routing.arms import OURS, Arm, ours, peers
from kvduplex_bench.routing.churn import churn
from kvduplex_bench.routing.report import (
    as_lines,
    churn_line,
    churn_table,
    plot,
    provenance,
    rolling_line,
    rolling_table,
    table,
)
from kvduplex_bench.routing.rolling import rolling
from kvduplex_bench.routing.run import Comparison, Fleet, Result, compare
from kvduplex_bench.traces.generate import GENERATORS
from kvduplex_bench.traces.model import Trace
from kvduplex_bench.traces.replay import load_trace

__all__ = ["routing"]

_CONVERSATIONS: Final = 6000
_BATCH: Final = 1200
_FLEETS: Final = ("8 replicas", "4P4D")
_FORM: Final = re.compile(r"([1-9]\d{0,2}) replicas|([1-9]\d{0,2})P([1-9]\d{0,2})D")


def routing(
    trace: Annotated[
        list[str] | None, typer.Option(help="agents, rag, batch, mix, or a file to replay; repeat for several.")
    ] = None,
    fleet: Annotated[
        list[str] | None, typer.Option(help="'8 replicas', 4P4D and the like; repeat for several.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies of this router; all of them; none for peers alone.")
    ] = None,
    peer: Annotated[str, typer.Option(help="Program of the peer, vllm-router; '' measures ours alone.")] = "",
    peer_policy: Annotated[list[str] | None, typer.Option(help="Policies of the peer; all of them.")] = None,
    load: Annotated[float, typer.Option(min=0.05, max=2.0, help="Share of the rate that the fleet can bear.")] = 0.8,
    seconds: Annotated[float, typer.Option(min=10, help="How long conversations begin.")] = 100.0,
    warm_up: Annotated[float, typer.Option(min=0, help="Of those seconds, not counted.")] = 30.0,
    model_timing: Annotated[str, typer.Option(help="Timing profile of the engines.")] = "qwen3-32b-h200",
    time_scale: Annotated[float, typer.Option(min=0.01, help="Seconds for one second of the profile.")] = 1.0,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder with tokenizer.json; the generated one.")] = None,
    seed: Annotated[int, typer.Option(help="Of the generated traces.")] = 1,
    at_once: Annotated[
        int, typer.Option(min=1, help="Arms compared at the same time; with more take a larger --time-scale.")
    ] = 1,
    churned: Annotated[
        bool, typer.Option("--churn", help="Add, remove, restart and kill engines instead of comparing.")
    ] = False,
    rolled: Annotated[
        bool, typer.Option("--rolling", help="Restart two routers in turns that share Valkey instead of comparing.")
    ] = False,
    every: Annotated[
        float, typer.Option("--every", "--churn-every", min=1, help="Seconds between such deeds or restarts.")
    ] = 20.0,
    output: Annotated[Path, typer.Option(help="Folder for JSON lines and plots.")] = Path("routing"),
) -> None:
    """Compare routing policies, and a peer's, over simulated engines: cached tokens, TTFT, throughput."""
    console = result_console()
    unwind_on_sigterm()
    try:
        arms = _arms(policy or list(OURS), peer, peer_policy or [])
        folder = tokenizer or _generated_tokenizer()
        output.mkdir(parents=True, exist_ok=True)
        facts = provenance(seed=seed)
        if churned or rolled:
            moving = _moving_fleet(fleet or [], churned=churned, rolled=rolled)
            comparison = Comparison(
                _trace((trace or ["agents"])[0], seed), moving, model_timing, folder,
                load=load, seconds=seconds, time_scale=time_scale,
            )  # fmt: skip
            _move(console, comparison, ours(policy or ["kv_events"]), every, output, facts, rolled=rolled)
            return
        for fleet_name in fleet or list(_FLEETS):
            for trace_name in trace or list(GENERATORS):
                comparison = Comparison(
                    _trace(trace_name, seed), _fleet(fleet_name), model_timing, folder,
                    load=load, seconds=seconds, warm_up=min(warm_up, seconds / 2), time_scale=time_scale,
                )  # fmt: skip
                with console.status("starting") as status:
                    results = compare(
                        comparison, arms, at_once=at_once, progress=status.update,
                        on_result=lambda result: _keep(result, facts, output),
                    )  # fmt: skip
                console.print(table(results))
                _draw(results, facts, output)
        console.print(f"JSON lines and plots: {output}")
    except (BenchError, OSError) as error:
        explain("bench routing", error)
        raise typer.Exit(1) from error


def _move(
    console: Console,
    comparison: Comparison,
    arms: list[Arm],
    every_s: float,
    folder: Path,
    facts: dict[str, object],
    *,
    rolled: bool,
) -> None:
    """Play with engines or routers in motion; a JSON line an arm, in a file for each kind."""
    faults: list[str] = []
    for arm in arms:
        with console.status("starting") as status:
            if rolled:
                routers = rolling(comparison, arm, every_s=every_s, progress=status.update)
                shown, line = rolling_table(routers), rolling_line(routers, comparison, facts)
                faults += routers.faults()
            else:
                engines = churn(comparison, arm, every_s=every_s, progress=status.update)
                shown, line = churn_table(engines), churn_line(engines, comparison, facts)
                faults += engines.faults()
        console.print(shown)
        with (folder / ("rolling.jsonl" if rolled else "churn.jsonl")).open("a") as file:
            file.write(line)
    if faults:
        raise BenchError("; ".join(faults))


def _moving_fleet(names: list[str], *, churned: bool, rolled: bool) -> Fleet:
    """The one fleet that is set in motion."""
    if churned and rolled:
        raise BenchError("--churn with --rolling: either engines or routers are set in motion; leave one out")
    if len(names) > 1:
        raise BenchError(f"--fleet {' --fleet '.join(names)}: --churn and --rolling take one fleet")
    found = _fleet(names[0] if names else "4P4D" if rolled else "8 replicas")
    if not rolled and not found.replicas:
        raise BenchError(f"--churn over {found.name}: its engines are replicas; --fleet '8 replicas', or --rolling")
    return found


def _arms(policies: list[str], peer: str, peer_policies: list[str]) -> list[Arm]:
    found = [] if policies == ["none"] else ours(policies)
    if not peer:
        if not found:
            raise BenchError("--policy none without --peer leaves nothing to compare")
        return found
    program = shutil.which(peer)
    if program is None:
        raise BenchError(f"--peer {peer}: no such program; pip install vllm-router in an environment of its own")
    return [*(peers(program, peer_policies) if peer_policies else peers(program)), *found]


def _trace(name: str, seed: int) -> Trace:
    if name in GENERATORS:
        return GENERATORS[name](_BATCH if name == "batch" else _CONVERSATIONS, seed)
    path = Path(name)
    if not path.is_file():
        raise BenchError(f"--trace {name}: neither a file nor one of {', '.join(GENERATORS)}")
    return load_trace(path)


def _fleet(name: str) -> Fleet:
    sizes = _FORM.fullmatch(name)
    if sizes is None:
        raise BenchError(f"--fleet {name}: expected engines as in {' or '.join(_FLEETS)}")
    return Fleet(name, *(int(size or 0) for size in sizes.groups()))


def _keep(result: Result, facts: dict[str, object], folder: Path) -> None:
    with (folder / "routing.jsonl").open("a") as file:
        file.write(as_lines([result], facts))


def _draw(results: list[Result], facts: dict[str, object], folder: Path) -> None:
    plot([json.loads(line) for line in as_lines(results, facts).splitlines()], folder)


def _generated_tokenizer() -> Path:
    """The generated model's folder, from the command that makes it."""
    command = [sys.executable, "-m", "kvduplex", "model", "make"]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    if made.returncode:
        raise BenchError(f"no tokenizer: {made.stderr.strip()}; name one with --tokenizer FOLDER")
    return Path(made.stdout.strip().splitlines()[-1])
