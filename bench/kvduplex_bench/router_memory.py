"""What conversations that never return cost the router's memory, and whether it is given back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.progress import Progress

from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.processes import unwind_on_sigterm
from kvduplex_bench.router_load import drive
from kvduplex_bench.router_rig import RouterProcess, fake_engines, own_router

__all__ = ["Growth", "How", "measure", "router_memory"]

_WARM_UP: Final = 2_000
_CONNECTIONS: Final = 16
_STEP: Final = 10_000
_SETTLED_S: Final = 1.0


class How(StrEnum):
    """How the router is told that the next turn could reuse."""

    LEASED = "leased"
    STOCK = "stock"


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of the router's own, in bytes above what it took after its first requests.

    Attributes:
        requests: One-shot conversations.
        errors: Of them, those not answered with 200.
        peak: The most, looked at every ten thousand conversations and at the end.
        idle: After the idle time.
        idle_s: Seconds nothing was asked of it.
        seconds: Wall time of the conversations.
    """

    requests: int
    errors: int
    peak: int
    idle: int
    idle_s: float
    seconds: float


def _bodies() -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        messages = [{"role": "user", "content": f"Question {number}: what is the square of {number}?"}]
        yield json.dumps({"model": "tiny", "messages": messages, "max_tokens": 16}).encode()


def measure(
    how: How, *, conversations: int, idle_s: float, keep_s: float, on_step: Callable[[int], None] = lambda _done: None
) -> Growth:
    """Ask as many one-turn conversations, none like another, then nothing for `idle_s` seconds.

    Args:
        how: Leases or the stock connector's parameters.
        conversations: How many.
        idle_s: Seconds to wait afterwards.
        keep_s: How long decode engines keep blocks, as the router is told.
        on_step: Told how many more were asked.

    Raises:
        BenchError: A process did not start.
    """
    flags = ["--reuse", how, "--decoder-kv-blocks-ttl", str(keep_s)]
    with fake_engines(leases=how is How.LEASED) as engines, own_router(engines, flags=flags) as router:
        bodies = _bodies()
        _ask(router, bodies, min(_WARM_UP, conversations))
        before = router.memory()
        began, peak, errors = time.monotonic(), 0, 0
        for asked in range(0, conversations, _STEP):
            step = min(_STEP, conversations - asked)
            errors += _ask(router, bodies, step)
            peak = max(peak, router.memory() - before)
            on_step(step)
        seconds = time.monotonic() - began
        time.sleep(max(idle_s, _SETTLED_S))
        return Growth(conversations, errors, peak, router.memory() - before, idle_s, seconds)


def _ask(router: RouterProcess, bodies: Iterator[bytes], count: int) -> int:
    return asyncio.run(drive(router.port, bodies, connections=_CONNECTIONS, requests=count)).errors


def router_memory(
    how: Annotated[How, typer.Option(help="What the next turn would reuse by.")] = How.LEASED,
    conversations: Annotated[int, typer.Option(min=1, help="One-turn conversations.")] = 1_000_000,
    idle_s: Annotated[float, typer.Option("--idle", min=0, help="Seconds without requests afterwards.")] = 180,
    keep_s: Annotated[float, typer.Option("--keep", min=1, help="Seconds that decode engines keep blocks.")] = 60,
) -> None:
    """Measure what conversations of one turn leave behind in the router, at their end and after idle time."""
    console = result_console()
    unwind_on_sigterm()
    try:
        with Progress(console=console) as progress:
            task = progress.add_task("conversations", total=conversations)
            growth = measure(
                how, conversations=conversations, idle_s=idle_s, keep_s=keep_s,
                on_step=lambda done: progress.advance(task, done),
            )  # fmt: skip
    except BenchError as error:
        explain("bench router-memory", error)
        raise typer.Exit(1) from error
    console.print(
        f"{growth.requests:,} one-turn conversations ({how}) in {growth.seconds:.0f} s: "
        f"at most {growth.peak / 2**20:.1f} MiB more, {growth.idle / 2**20:.1f} MiB after {growth.idle_s:g} s idle; "
        f"{growth.errors} failed.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if growth.errors:
        raise typer.Exit(1)
