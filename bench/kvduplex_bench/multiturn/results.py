"""A run's record read back: points of the sweep with their arms, and what was asked of them. Pure but for reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.engines import Counted, Split
from kvduplex_bench.multiturn.journal import read_lines
from kvduplex_bench.multiturn.workload import Arm
from kvduplex_bench.stats import Summary, percentile, summarise

__all__ = ["Cell", "Results", "TurnSeen", "load"]


@dataclass(frozen=True, slots=True)
class TurnSeen:
    """One counted turn, for figures over time.

    Attributes:
        at_s: When it was sent, in seconds since 1970.
        ttft_s: Time to first token.
        prompt_tokens: Length of the prompt.
        cached_tokens: Tokens of it that were not computed; None when nobody said.
        plan: The router's plan; empty when it did not say.
    """

    at_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None
    plan: str


@dataclass(slots=True)
class Cell:
    """All repeats of one arm at one point in one setting.

    Attributes:
        setting: Of the cluster.
        arm: Which.
        prefix_tokens: Length of the constant prefix.
        turns: Counted turns.
        e2e_s: Their times to the last token.
        gaps_s: Their gaps between tokens.
        repeat_ttft_s: Median time to first token of each repeat.
        counted: From the engines, summed over repeats.
        errors: Failed turns, warm-up included.
        client_cpu_s: CPU of the client.
        wall_s: Time that it played.
        compared: Verdicts of comparisons with a plain engine.
    """

    setting: str
    arm: Arm
    prefix_tokens: int
    turns: list[TurnSeen] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    repeat_ttft_s: list[float] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)
    errors: int = 0
    client_cpu_s: float = 0.0
    wall_s: float = 0.0
    compared: list[str] = field(default_factory=list)

    @property
    def ttft(self) -> Summary:
        """Of times to first token, in seconds."""
        return summarise([turn.ttft_s for turn in self.turns])

    @property
    def e2e(self) -> Summary:
        """Of times to the last token, in seconds."""
        return summarise(self.e2e_s)

    @property
    def itl(self) -> Summary | None:
        """Of gaps between tokens, in seconds; None for answers of one token."""
        return summarise(self.gaps_s) if self.gaps_s else None

    @property
    def prompt_tokens(self) -> float:
        """Median length of the prompts."""
        return percentile([turn.prompt_tokens for turn in self.turns], 50)

    @property
    def split(self) -> Split | None:
        """The mean prefill request's time in parts; None without engines' metrics."""
        return self.counted.split

    @property
    def pulled_bytes_per_turn(self) -> float:
        """Mean bytes read from decode engines by a turn's prefill."""
        return self.counted.pulled_bytes / self.counted.requests if self.counted.requests else 0.0


@dataclass(slots=True)
class Results:
    """A whole run.

    Attributes:
        path: The record.
        runs: Opening lines, one a sitting; the last is what reports name.
        cells: By setting, prefix and arm.
        bandwidth: Bytes a second by setting: the slowest median of the reads that were as large as the run's own.
        complete: Whether everything was played.
        unclosed: Turns of segments that were never completed; they are in no cell.
    """

    path: Path
    runs: list[dict[str, Any]] = field(default_factory=list)
    cells: dict[tuple[str, int, Arm], Cell] = field(default_factory=dict)
    bandwidth: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    complete: bool = False
    unclosed: int = 0

    @property
    def settings(self) -> list[str]:
        """In the order of the run."""
        return list(dict.fromkeys(setting for setting, _, _ in self.cells))

    def prefixes(self, setting: str) -> list[int]:
        """Points of a setting, ascending."""
        return sorted({prefix for one, prefix, _ in self.cells if one == setting})

    def cell(self, setting: str, prefix: int, arm: Arm) -> Cell | None:
        """That arm at that point, when any of its turns was answered."""
        found = self.cells.get((setting, prefix, arm))
        return found if found is not None and found.turns else None

    def of_arm(self, setting: str, arm: Arm) -> list[Cell]:
        """An arm's points, ascending."""
        cells = (self.cell(setting, prefix, arm) for prefix in self.prefixes(setting))
        return [cell for cell in cells if cell is not None]

    def read_s(self, setting: str, size: float) -> float | None:
        """Seconds that reading `size` bytes takes at the bandwidth measured in this run; None when it was not."""
        measured = [item for reads in (self.bandwidth.get(setting) or [], *self.bandwidth.values()) for item in reads]
        if not measured:
            return None
        nearest, rate = min(measured, key=lambda item: abs(item[0] - size))
        del nearest
        return size / rate


def load(path: Path) -> Results:
    """Read a record.

    Raises:
        BenchError: It cannot be read, is no record, or holds no measured turn.
    """
    results = Results(path)
    waiting: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(path):
        _take(results, waiting, line)
    results.unclosed = sum(map(len, waiting.values()))
    if not any(cell.turns for cell in results.cells.values()):
        raise BenchError(f"{path}: holds no measured turn; there is nothing to show")
    return results


def _take(results: Results, waiting: dict[str, list[dict[str, Any]]], line: dict[str, Any]) -> None:
    try:
        match line["kind"]:
            case "run":
                results.runs.append(line)
                results.complete = False
            case "turn":
                waiting.setdefault(line["segment"], []).append(line)
            case "segment":
                _close(results, line, waiting.pop(line["segment"], []))
            case "bandwidth":
                rates = results.bandwidth.setdefault(line["setting"], [])
                rates += [(read["bytes"], read["bytes"] / percentile(read["seconds"], 50)) for read in line["reads"]]
            case "end":
                results.complete = bool(line["complete"])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"{results.path}: a {line['kind']} line lacks or garbles {error}; the file is damaged"
        ) from error


def _close(results: Results, line: dict[str, Any], turns: Sequence[dict[str, Any]]) -> None:
    arm = Arm(line["arm"])
    key = (line["setting"], line["prefix_tokens"], arm)
    cell = results.cells.setdefault(key, Cell(key[0], arm, key[1]))
    cell.errors += line["errors"]
    counted = [turn for turn in turns if turn["counts"] and "ttft_s" in turn]
    _add_turns(cell, counted)
    if counted:
        cell.repeat_ttft_s.append(percentile([turn["ttft_s"] for turn in counted], 50))
    if line["counted"]:
        cell.counted += Counted(**line["counted"])
    cell.client_cpu_s += line["client_cpu_s"]
    cell.wall_s += line["wall_s"]
    if line["compared"]:
        cell.compared.append(line["compared"]["verdict"])


def _add_turns(cell: Cell, turns: Iterable[dict[str, Any]]) -> None:
    for turn in turns:
        cell.turns.append(
            TurnSeen(turn["at_s"], turn["ttft_s"], turn["prompt_tokens"], turn["cached_tokens"], turn["plan"])
        )
        cell.e2e_s.append(turn["e2e_s"])
        cell.gaps_s += turn["gaps_s"]
