"""What the run was asked to show, judged by its own figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvduplex_bench.multiturn.results import Cell, Results
from kvduplex_bench.multiturn.workload import Arm
from kvduplex_bench.stats import percentile

__all__ = ["Check", "checks"]

_PUBLISHED_RATIO: Final = 3.3
_ABOVE_FLOOR: Final = 1.2
_NEVER_SLOWER: Final = 1.03
_CLIENT_SHARE: Final = 0.15


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer.

    Attributes:
        what: The question, with where it was asked.
        seen: The figure.
        bar: What it is held against.
        holds: Whether it is met.
    """

    what: str
    seen: str
    bar: str
    holds: bool


def checks(results: Results) -> list[Check]:
    """Every question that the record can answer."""
    found = [*_speed_up(results), *_near_floor(results), *_never_slower(results), *_client(results)]
    return [*found, *_reuse(results), *_exactness(results), *_errors(results)]


def _median_ms(cell: Cell) -> float:
    """Median over repeats of the repeats' medians, in ms."""
    return percentile(cell.repeat_ttft_s, 50) * 1e3


def _cache_off(setting: str) -> bool:
    return setting.endswith("prefill cache off")


def _cache_on(setting: str) -> bool:
    return setting.endswith("prefill cache on")


def _speed_up(results: Results) -> Iterator[Check]:
    for setting in filter(_cache_off, results.settings):
        prefix = results.prefixes(setting)[-1]
        off, on = (results.cell(setting, prefix, arm) for arm in (Arm.OFF, Arm.ON))
        if off and on:
            ratio = _median_ms(off) / _median_ms(on)
            what = f"TTFT off/on at the longest prefix, {prefix:,} tokens ({setting})"
            yield Check(what, f"{ratio:.1f}", f"above {_PUBLISHED_RATIO}", ratio > _PUBLISHED_RATIO)


def _near_floor(results: Results) -> Iterator[Check]:
    """`on` without the prefill cache, against the same turn with its whole history in it, and the bytes that move."""
    for setting in filter(_cache_off, results.settings):
        twin = setting.removesuffix("off") + "on"
        for prefix in results.prefixes(setting):
            on, floor = results.cell(setting, prefix, Arm.ON), results.cell(twin, prefix, Arm.FLOOR)
            read_s = results.read_s(setting, on.pulled_bytes_per_turn) if on else None
            if on and floor and read_s is not None:
                seen, bar = _median_ms(on), _ABOVE_FLOOR * _median_ms(floor) + read_s * 1e3
                what = f"TTFT on, {prefix:,} tokens ({setting}), against {_ABOVE_FLOOR} x floor + bytes / bandwidth"
                yield Check(what, f"{seen:,.0f} ms", f"at most {bar:,.0f} ms", seen <= bar)


def _never_slower(results: Results) -> Iterator[Check]:
    for setting in filter(_cache_on, results.settings):
        for prefix in results.prefixes(setting):
            off, on = (results.cell(setting, prefix, arm) for arm in (Arm.OFF, Arm.ON))
            if off and on:
                ratio = _median_ms(on) / _median_ms(off)
                what = f"TTFT on/off, {prefix:,} tokens ({setting})"
                yield Check(what, f"{ratio:.3f}", f"at most {_NEVER_SLOWER}", ratio <= _NEVER_SLOWER)


def _client(results: Results) -> Iterator[Check]:
    cells = results.cells.values()
    wall = sum(cell.wall_s for cell in cells)
    if wall:
        share = sum(cell.client_cpu_s for cell in cells) / wall
        yield Check("CPU of the benchmark's client", f"{share:.1%} of a core", "below 15%", share < _CLIENT_SHARE)


def _reuse(results: Results) -> Iterator[Check]:
    """Without it every other figure of ``on`` is one of ``off``: reuse is off, or the engines lack the connector."""
    for setting in results.settings:
        counted = [cell.counted for cell in results.of_arm(setting, Arm.ON) if cell.counted.requests]
        if counted:
            pulled, requests = sum(one.pulled_tokens for one in counted), sum(one.requests for one in counted)
            what = f"Tokens read from decode engines a turn ({setting})"
            yield Check(what, f"{pulled / requests:,.0f}", "above 0", pulled > 0)


def _exactness(results: Results) -> Iterator[Check]:
    verdicts = [verdict for cell in results.cells.values() for verdict in cell.compared]
    if verdicts:
        wrong = verdicts.count("different")
        seen = f"{len(verdicts) - wrong} of {len(verdicts)}"
        yield Check("Answers equal to a plain engine's", seen, "all", not wrong)


def _errors(results: Results) -> Iterator[Check]:
    failed = sum(cell.errors for cell in results.cells.values())
    yield Check("Failed turns", str(failed), "0", not failed)
