"""What a router itself costs: CPU per request and added time to first byte, beside another router in the same run.

Both routers stand in front of the same two fake engines and take turns, A B A B, so that what else the machine does
falls on both. Compared are paired ratios, of CPU seconds per request summed over all threads and processes of a router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.processes import unwind_on_sigterm
from kvduplex_bench.router_load import Load, drive
from kvduplex_bench.router_rig import RouterProcess, fake_engines, own_router, peer_router

__all__ = ["CASES", "Case", "Measured", "router_cost", "run"]

_WARM_UP: Final = 0.25


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request.

    Attributes:
        name: For the table.
        body_bytes: About how large its body is.
        chunks: Stream chunks; 0 asks for a whole answer.
        pause_ms: Between chunks.
    """

    name: str
    body_bytes: int
    chunks: int = 0
    pause_ms: int = 0

    def body(self) -> bytes:
        """Its request body."""
        count = 1 if self.body_bytes < 4000 else 30  # noqa: PLR2004 - a short chat or a long one
        text = 'the quick brown fox reads 数据 and says "it\'s cached" ' * (self.body_bytes // count // 60 + 1)
        roles = ["user", "assistant"]
        messages = [{"role": roles[i % 2], "content": text} for i in range(count)]
        stream = {"stream": True, "stream_options": {"include_usage": True}} if self.chunks else {}
        more = {"seed": self.pause_ms} if self.pause_ms else {}
        value = {"model": "tiny", "messages": [*messages, {"role": "user", "content": "go on"}], **stream, **more}
        return json.dumps({**value, "max_tokens": self.chunks or 16, "temperature": 0.7}, ensure_ascii=False).encode()


CASES: Final = (
    Case("1 kB, whole", 1_000),
    Case("60 kB, whole", 60_000),
    Case("1 kB, burst of 256", 1_000, 256),
    Case("60 kB, burst of 256", 60_000, 256),
    Case("1 kB, 32 at 20 ms", 1_000, 32, 20),
    Case("60 kB, 32 at 20 ms", 60_000, 32, 20),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One case at one concurrency.

    Attributes:
        case: Which.
        connections: Concurrency.
        cpu_us: CPU of our router per request, median over rounds, in microseconds.
        peer_cpu_us: The peer's; None without one.
        ratio: Median of the rounds' ratios, ours to the peer's.
        ratio_low: Smallest of them.
        ratio_high: Largest of them.
        first_byte_ms: Median time to first byte through our router.
        direct_ms: The same asked of the fake engine directly.
        errors: Requests of ours that failed.
    """

    case: Case
    connections: int
    cpu_us: float
    peer_cpu_us: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    first_byte_ms: float
    direct_ms: float
    errors: int


def run(
    *,
    cases: tuple[Case, ...] = CASES,
    connections: tuple[int, ...] = (1, 16, 64),
    requests: int = 1000,
    rounds: int = 5,
    workers: int = 1,
    peer: str | None = None,
    on_result: Callable[[Measured], None] = lambda _measured: None,
) -> list[Measured]:
    """Measure.

    Args:
        cases: Kinds of requests.
        connections: Concurrencies.
        requests: Per round; a paced case takes fewer, for it lasts.
        rounds: Turns each router takes.
        workers: Processes of our router.
        peer: The other router's program; None measures ours alone.
        on_result: Told each result as it is there.

    Raises:
        BenchError: A process did not start.
    """
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(fake_engines())
        ours = stack.enter_context(own_router(engines, workers=workers))
        theirs = None if peer is None else stack.enter_context(peer_router(peer, engines))
        measured: list[Measured] = []
        for case in cases:
            for concurrency in connections:
                count = max(8 * concurrency, 16) if case.pause_ms else requests
                measured.append(_measure(case, concurrency, count, rounds, ours, theirs, engines.port))
                on_result(measured[-1])
        return measured


def _measure(
    case: Case,
    connections: int,
    requests: int,
    rounds: int,
    ours: RouterProcess,
    theirs: RouterProcess | None,
    engine_port: int,
) -> Measured:
    body = case.body()
    routers = [ours] if theirs is None else [ours, theirs]
    for router in routers:
        _drive(router.port, body, connections, max(1, int(requests * _WARM_UP)))
    direct = _drive(engine_port, body, connections, max(1, requests // 4))
    costs: list[list[float]] = [[] for _ in routers]
    firsts: list[float] = []
    errors = 0
    for _ in range(rounds):
        for router, cost in zip(routers, costs, strict=True):
            before = router.cpu_s()
            load = _drive(router.port, body, connections, requests)
            cost.append((router.cpu_s() - before) / max(load.requests, 1))
            if router is ours:
                firsts.append(load.first_byte_p50_ms)
                errors += load.errors
    ratios = [mine / other for mine, other in zip(costs[0], costs[1], strict=True)] if theirs is not None else []
    return Measured(
        case,
        connections,
        statistics.median(costs[0]) * 1e6,
        statistics.median(costs[1]) * 1e6 if ratios else None,
        statistics.median(ratios) if ratios else None,
        min(ratios, default=None),
        max(ratios, default=None),
        statistics.median(firsts),
        direct.first_byte_p50_ms,
        errors,
    )


def _drive(port: int, body: bytes, connections: int, requests: int) -> Load:
    return asyncio.run(drive(port, body, connections=connections, requests=requests))


def router_cost(
    peer: Annotated[str, typer.Option(help="Program of the peer, e.g. vllm-router; '' measures ours alone.")] = "",
    requests: Annotated[int, typer.Option(min=10, help="Requests per round.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per case.")] = 5,
    connections: Annotated[list[int] | None, typer.Option(help="Concurrency; repeat for several.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes of our router.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write the results to this file, as JSON lines.")] = None,
) -> None:
    """Compare the router's own CPU per request with a peer's over fake engines, in paired rounds."""
    console = result_console()
    program = shutil.which(peer) if peer else None
    if peer and program is None:
        raise typer.BadParameter(f"'{peer}' is not a program; pip install vllm-router in an environment of its own")
    levels = tuple(connections) if connections else (1, 16, 64)
    unwind_on_sigterm()
    try:
        with console.status("measuring") as status:
            results = run(
                connections=levels, requests=requests, rounds=rounds, workers=workers, peer=program,
                on_result=lambda done: status.update(f"{done.case.name}, {done.connections} connections"),
            )  # fmt: skip
    except BenchError as error:
        explain("bench router", error)
        raise typer.Exit(1) from error
    console.print(_table(results))
    if output is not None:
        output.write_text("".join(json.dumps(_row(result)) + "\n" for result in results))
    if any(result.errors for result in results):
        raise typer.Exit(1)


def _table(results: list[Measured]) -> Table:
    table = Table(title="Router CPU per request")
    for heading in (
        "request",
        "connections",
        "ours (µs)",
        "peer (µs)",
        "ratio",
        "range",
        "first byte (ms)",
        "direct (ms)",
    ):
        table.add_column(heading, justify="left" if heading == "request" else "right")
    for each in results:
        peer = [f"{each.peer_cpu_us:.0f}", f"{each.ratio:.2f}", f"{each.ratio_low:.2f} to {each.ratio_high:.2f}"] if (
            each.peer_cpu_us is not None) else ["-", "-", "-"]  # fmt: skip
        times = [f"{each.first_byte_ms:.2f}", f"{each.direct_ms:.2f}"]
        table.add_row(each.case.name, str(each.connections), f"{each.cpu_us:.0f}", *peer, *times)
    return table


def _row(result: Measured) -> dict[str, object]:
    names = ("connections", "cpu_us", "peer_cpu_us", "ratio", "ratio_low", "ratio_high", "first_byte_ms", "direct_ms",
             "errors")  # fmt: skip
    return {"case": result.case.name, **{name: getattr(result, name) for name in names}}
