"""How many more requests several router processes on one socket answer than one, and what the machine leaves for that.

Load and fake engines take part of the same cores, so the cores may be full before the workers are. Printed beside the
ratio is therefore the most that any router of this cost could reach here: all cores over the CPU that a request takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import psutil
import typer
from rich.table import Table

from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.processes import unwind_on_sigterm
from kvduplex_bench.router_cost import CASES, Case
from kvduplex_bench.router_load import drive
from kvduplex_bench.router_rig import Engines, RouterProcess, fake_engines, own_router

__all__ = ["Scaling", "measure", "router_workers"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """One kind of request through one worker and through several.

    Attributes:
        case: Which.
        one: Requests per second through one worker, median of the rounds.
        several: Through several.
        ratio: Median of the rounds' ratios.
        router_us: CPU of the router per request, in microseconds, with several workers.
        others_us: CPU of load and engines per request.
        errors: Failed requests.
    """

    case: Case
    one: float
    several: float
    ratio: float
    router_us: float
    others_us: float
    errors: int

    def ceiling(self, cores: int) -> float:
        """The most requests per second that `cores` can serve at this cost, to the rate of one worker."""
        return cores * 1e6 / (self.router_us + self.others_us) / self.one


@dataclass(frozen=True, slots=True)
class _Round:
    rate: float
    router_s: float
    others_s: float
    errors: int


def measure(
    workers: int,
    *,
    cases: Sequence[Case] = CASES,
    connections: int = 64,
    requests: int = 4000,
    rounds: int = 5,
    on_result: Callable[[Scaling], None] = lambda _scaling: None,
) -> list[Scaling]:
    """Measure every case that does not pause, one worker and `workers` taking turns over engines of their own.

    Raises:
        BenchError: A process did not start.
    """
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(fake_engines())
        one = stack.enter_context(own_router(engines))
        several = stack.enter_context(own_router(engines, workers=workers))
        results = []
        for case in cases:
            if case.pause_ms:
                continue
            results.append(_scaling(case, engines, (one, several), connections, requests, rounds))
            on_result(results[-1])
        return results


def _scaling(
    case: Case, engines: Engines, routers: tuple[RouterProcess, RouterProcess], connections: int, requests: int,
    rounds: int,
) -> Scaling:  # fmt: skip
    for router in routers:
        _round(case, engines, router, connections, max(1, requests // 4))
    taken = [tuple(_round(case, engines, router, connections, requests) for router in routers) for _ in range(rounds)]
    ones, severals = zip(*taken, strict=True)
    return Scaling(
        case,
        statistics.median(each.rate for each in ones),
        statistics.median(each.rate for each in severals),
        statistics.median(many.rate / single.rate for single, many in taken),
        statistics.median(each.router_s for each in severals) / requests * 1e6,
        statistics.median(each.others_s for each in severals) / requests * 1e6,
        sum(each.errors for pair in taken for each in pair),
    )


def _round(case: Case, engines: Engines, router: RouterProcess, connections: int, requests: int) -> _Round:
    router_s, others_s = router.cpu_s(), engines.cpu_s() + time.process_time()
    load = asyncio.run(drive(router.port, case.body(), connections=connections, requests=requests))
    return _Round(load.rate, router.cpu_s() - router_s, engines.cpu_s() + time.process_time() - others_s, load.errors)


def router_workers(
    workers: Annotated[int, typer.Option(min=2, help="Processes of the router beside one.")] = 4,
    connections: Annotated[int, typer.Option(min=1, help="Concurrency.")] = 64,
    requests: Annotated[int, typer.Option(min=10, help="Requests per round.")] = 4000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per case.")] = 5,
) -> None:
    """Compare the request rate of several workers on one socket with that of one, in paired rounds."""
    console = result_console()
    unwind_on_sigterm()
    try:
        with console.status("measuring") as status:
            results = measure(
                workers, connections=connections, requests=requests, rounds=rounds,
                on_result=lambda done: status.update(done.case.name),
            )  # fmt: skip
    except BenchError as error:
        explain("bench router-workers", error)
        raise typer.Exit(1) from error
    console.print(_table(results, workers))
    if any(result.errors for result in results):
        raise typer.Exit(1)


def _table(results: Sequence[Scaling], workers: int) -> Table:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    table = Table(title=f"{workers} workers beside one, {cores} cores for routers, load and engines")
    for heading in ("request", "one (1/s)", f"{workers} (1/s)", "ratio", "router (µs)", "others (µs)", "ceiling"):
        table.add_column(heading, justify="left" if heading == "request" else "right")
    for each in results:
        rates = (f"{each.one:.0f}", f"{each.several:.0f}", f"{each.ratio:.2f}")
        costs = (f"{each.router_us:.0f}", f"{each.others_us:.0f}", f"{each.ceiling(cores):.2f}")
        table.add_row(each.case.name, *rates, *costs)
    return table
