"""What a claim adds to a turn that pulls: the leased connector beside the stock one, cluster after cluster in one run.

Only one cluster runs at a time, for idle engines cost too, and they take turns, so that what else the machine does is
shared. Turns that compute everything are the control: there both connectors should take the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from rich.table import Table

from kvduplex_bench.cluster import Cluster, free_ports, started
from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.smoke import Arm, Turn, engine_arguments, run, short_turns

__all__ = ["CONNECTORS", "Overhead", "Round", "claims", "compare", "measure"]

CONNECTORS: Final = ("leased", "stock")


@dataclass(frozen=True, slots=True)
class Round:
    """Medians of one cluster.

    Attributes:
        connector: Which its engines ran with.
        reuse_s: Time inside the prefill engine of turns that pull.
        recompute_s: Of turns that compute everything.
        step_s: Of turns of one line, which one engine step computes.
        pulls: Turns that pulled.
    """

    connector: str
    reuse_s: float
    recompute_s: float
    step_s: float
    pulls: int


@dataclass(frozen=True, slots=True)
class Overhead:
    """Leased against stock, medians over the rounds.

    Attributes:
        added_s: By how much longer a pulling turn is inside the prefill engine; below 0 it is shorter.
        control_s: The same of turns that claim nothing: what else differs between the two.
        pull_s: By how much more a pulling turn takes beyond a turn of one line, which leaves that out.
        step_s: One engine step, of both connectors.
    """

    added_s: float
    control_s: float
    pull_s: float
    step_s: float


def measure(connector: str, turns: Sequence[Turn], short: Sequence[Turn]) -> Round:
    """Medians of one cluster's turns.

    Raises:
        BenchError: A turn that should have pulled pulled nothing.
    """
    reuse = [turn for turn in turns if turn.arm is Arm.REUSE]
    recompute = [turn.hop_s for turn in turns if turn.arm is Arm.RECOMPUTE]
    empty = sum(not turn.reused_tokens for turn in reuse)
    if empty or not (reuse and recompute and short):
        raise BenchError(
            f"{empty} of {len(reuse)} turns over the {connector} connector pulled nothing; its log says why"
        )
    reuse_s, step_s = ([turn.hop_s for turn in some] for some in (reuse, short))
    return Round(
        connector, statistics.median(reuse_s), statistics.median(recompute), statistics.median(step_s), len(reuse)
    )


def compare(rounds: Sequence[Round]) -> Overhead:
    """Compare neighbours, the first leased round with the first stock one and so on.

    Raises:
        BenchError: The connectors have no or different numbers of rounds.
    """
    leased, stock = ([each for each in rounds if each.connector == connector] for connector in CONNECTORS)
    if not leased or len(leased) != len(stock):
        raise BenchError(f"{len(leased)} rounds of leased against {len(stock)} of stock; nothing to compare")
    pairs = list(zip(leased, stock, strict=True))
    return Overhead(
        statistics.median(one.reuse_s - other.reuse_s for one, other in pairs),
        statistics.median(one.recompute_s - other.recompute_s for one, other in pairs),
        statistics.median((one.reuse_s - one.step_s) - (other.reuse_s - other.step_s) for one, other in pairs),
        statistics.median(each.step_s for each in rounds),
    )


def _round(connector: str, tokens: int, repeats: int, seed: int) -> Round:
    (port,) = free_ports(1)
    with started(["--port", str(port), *engine_arguments(tokens, connector)]) as cluster:
        return measure(connector, *_turns(cluster, tokens, repeats, seed))


def _turns(cluster: Cluster, tokens: int, repeats: int, seed: int) -> tuple[list[Turn], list[Turn]]:
    return run(cluster, tokens=tokens, repeats=repeats, seed=seed), short_turns(cluster, repeats=repeats, seed=seed)


def _rounds(tokens: int, repeats: int, rounds: int, told: Callable[[str], None]) -> list[Round]:
    measured = []
    for number in range(rounds):
        for connector in CONNECTORS if number % 2 == 0 else reversed(CONNECTORS):
            told(f"round {number + 1} of {rounds}: {connector}")
            measured.append(_round(connector, tokens, repeats, number))
    return measured


def claims(
    tokens: Annotated[int, typer.Option(min=100, help="Least length of turn 2's prompt, in tokens.")] = 1800,
    repeats: Annotated[int, typer.Option(min=1, help="Pulling turns per cluster.")] = 15,
    rounds: Annotated[int, typer.Option(min=1, help="Clusters per connector.")] = 4,
) -> None:
    """Time what a claim adds to a pulling turn, leased beside stock engines, from the prefill engine's own metrics."""
    console = result_console()
    try:
        with console.status("starting") as status:
            measured = _rounds(tokens, repeats, rounds, status.update)
        overhead = compare(measured)
    except BenchError as error:
        explain("bench claims", error)
        raise typer.Exit(1) from error
    console.print(_table(measured))
    console.print(
        f"A pulling turn takes {overhead.added_s * 1e3:+.1f} ms with leases, one that computes all "
        f"{overhead.control_s * 1e3:+.1f} ms; beyond a turn of one line, pulling takes "
        f"{overhead.pull_s * 1e3:+.1f} ms. An engine step takes {overhead.step_s * 1e3:.1f} ms.",
        highlight=False,
    )


def _table(rounds: Sequence[Round]) -> Table:
    table = Table(title="Time inside the prefill engine, medians (ms)")
    for heading in ("connector", "pulling", "computing all", "one line", "pulls"):
        table.add_column(heading, justify="left" if heading == "connector" else "right")
    for each in rounds:
        times = (each.reuse_s, each.recompute_s, each.step_s)
        table.add_row(each.connector, *(f"{time_s * 1e3:.1f}" for time_s in times), str(each.pulls))
    return table
