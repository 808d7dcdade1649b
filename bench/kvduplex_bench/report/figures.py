"""The figures: time to first token, where prefill's time went, and reuse over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.results import Cell, Results, TurnSeen
from kvduplex_bench.multiturn.workload import Arm
from kvduplex_bench.report.style import ARMS, PARTS, PLANS, note, styled
from kvduplex_bench.stats import percentile

__all__ = ["FIGURES", "draw"]

_WIDTH: Final = 5.4
_BINS: Final = 24
_S_PER_MIN: Final = 60.0
_LOG_SPAN: Final = 8.0
"""Above this ratio of slowest to fastest a linear axis would press the fast arm onto the baseline."""


def draw(name: str, results: Results, source: str) -> Figure:
    """Draw one of `FIGURES`.

    Args:
        name: Which.
        results: The run.
        source: One line of provenance to stand below.

    Raises:
        BenchError: The run has nothing for it.
    """
    with styled():
        figure = FIGURES[name](results)
        note(figure, source + ("" if results.complete else "  PARTIAL RUN"))
        return figure


def _panels(results: Results, rows: int, height: float) -> tuple[Figure, Any]:
    columns = len(results.settings)
    figure = Figure(figsize=(_WIDTH * columns + 0.4, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.035, 1, 0.965))  # type: ignore[union-attr, call-arg]
    return figure, figure.subplots(rows, columns, squeeze=False)


def _ttft(results: Results) -> Figure:
    figure, grid = _panels(results, 1, 4.4)
    for axes, setting in zip(grid[0], results.settings, strict=True):
        for arm in Arm:
            if cells := results.of_arm(setting, arm):
                _line(axes, arm, cells)
        _bound(axes, results, setting)
        _ttft_axes(axes, results, setting)
    return figure


def _line(axes: Axes, arm: Arm, cells: Sequence[Cell]) -> None:
    look = ARMS[arm]
    middle = [percentile(cell.repeat_ttft_s, 50) for cell in cells]
    low = [value - min(cell.repeat_ttft_s) for value, cell in zip(middle, cells, strict=True)]
    high = [max(cell.repeat_ttft_s) - value for value, cell in zip(middle, cells, strict=True)]
    axes.errorbar(
        [cell.prompt_tokens / 1e3 for cell in cells],
        middle,
        yerr=[low, high],
        label=look.label,
        color=look.colour,
        marker=look.marker,
        linestyle=look.dashes,
        capsize=3,
        elinewidth=0.9,
    )


def _bound(axes: Axes, results: Results, setting: str) -> None:
    """1.2 times the floor plus the bytes' own time: what reuse may cost at most."""
    twin = setting.removesuffix("off") + "on"
    points = []
    for on in results.of_arm(setting, Arm.ON):
        floor = results.cell(twin, on.prefix_tokens, Arm.FLOOR) if twin != setting else None
        read_s = results.read_s(setting, on.pulled_bytes_per_turn)
        if floor and read_s is not None:
            points.append((on.prompt_tokens / 1e3, 1.2 * percentile(floor.repeat_ttft_s, 50) + read_s))
    if points:
        axes.plot(*zip(*points, strict=True), color="#555555", linestyle=":", label="1.2 x floor + bytes / bandwidth")


def _ttft_axes(axes: Axes, results: Results, setting: str) -> None:
    axes.set_title(setting)
    axes.set_xlabel("prompt length (thousand tokens)")
    axes.set_ylabel("time to first token (s)")
    axes.set_xlim(left=0)
    times = [value for arm in Arm for cell in results.of_arm(setting, arm) for value in cell.repeat_ttft_s]
    if max(times) > _LOG_SPAN * min(times):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend(loc="upper left", fontsize=8.5)
    _head_room(axes)
    _ratio(axes, results, setting)


def _head_room(axes: Axes) -> None:
    """Space above the data for the legend."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.45 if axes.get_yscale() == "log" else low + (high - low) * 1.5)


def _ratio(axes: Axes, results: Results, setting: str) -> None:
    """How far the two arms are apart at the longest prompt."""
    prefix = results.prefixes(setting)[-1]
    off, on = (results.cell(setting, prefix, arm) for arm in (Arm.OFF, Arm.ON))
    if not (off and on):
        return
    slow, fast = percentile(off.repeat_ttft_s, 50), percentile(on.repeat_ttft_s, 50)
    middle = (slow * fast) ** 0.5 if axes.get_yscale() == "log" else (slow + fast) / 2
    x = on.prompt_tokens / 1e3
    axes.annotate("", (x, slow), (x, fast), arrowprops={"arrowstyle": "<->", "color": "#555555", "lw": 0.8})
    axes.text(x - 0.015 * axes.get_xlim()[1], middle, f"{slow / fast:.1f}x", ha="right", va="center", fontsize=9)


def _split(results: Results) -> Figure:
    if not any(cell.split for cell in results.cells.values()):
        raise BenchError("the run has no engines' metrics (--prefill was not given); prefill's time cannot be split")
    figure, grid = _panels(results, 2, 7.0)
    for column, setting in enumerate(results.settings):
        present = [arm for arm in Arm if any(cell.split for cell in results.of_arm(setting, arm))]
        _stacks(grid[0][column], results, setting, present)
        grid[0][column].set_title(f"{setting}: {', '.join(present)}")
        if Arm.ON in present:
            _stacks(grid[1][column], results, setting, [arm for arm in present if arm is not Arm.OFF])
            grid[1][column].set_title("the same without off, on a scale of its own")
        else:
            grid[1][column].set_visible(False)
    grid[0][0].legend(handles=_part_handles(grid[0][0]), fontsize=8.5, loc="upper left")
    return figure


def _stacks(axes: Axes, results: Results, setting: str, arms: Sequence[Arm]) -> None:
    prefixes = results.prefixes(setting)
    width = 0.8 / max(1, len(arms))
    ticks: list[tuple[float, str]] = []
    for slot, arm in enumerate(arms):
        for index, prefix in enumerate(prefixes):
            cell = results.cell(setting, prefix, arm)
            if cell and cell.split:
                place = index + (slot - (len(arms) - 1) / 2) * width
                _stack(axes, place, width, cell)
                ticks.append((place, str(arm)))
    axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks], rotation=90, fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("prefill request, mean (ms)")
    _prefix_axis(axes, prefixes)


def _prefix_axis(axes: Axes, prefixes: Sequence[int]) -> None:
    below = axes.secondary_xaxis(-0.15)
    below.set_xticks(range(len(prefixes)), [f"{prefix / 1e3:g}k" for prefix in prefixes])
    below.tick_params(length=0)
    below.spines["bottom"].set_visible(False)
    below.set_xlabel("length of the constant prefix (tokens)")


def _stack(axes: Axes, place: float, width: float, cell: Cell) -> None:
    base = 0.0
    for part, look in PARTS.items():
        value = getattr(cell.split, part) * 1e3
        axes.bar(
            place,
            value,
            width * 0.9,
            bottom=base,
            color=look.colour,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0.3,
        )
        base += value


def _part_handles(axes: Axes) -> list[Any]:
    return [
        axes.bar(0, 0, color=look.colour, hatch=look.hatch, edgecolor="white", label=look.label)
        for look in PARTS.values()
    ]


def _timeline(results: Results) -> Figure:
    figure, grid = _panels(results, 2, 6.2)
    for column, setting in enumerate(results.settings):
        turns = {arm: [turn for cell in results.of_arm(setting, arm) for turn in cell.turns] for arm in Arm}
        began = min(turn.at_s for some in turns.values() for turn in some)
        _hit_rates(grid[0][column], turns, began)
        grid[0][column].set_title(setting)
        _plan_mix(grid[1][column], [turn for some in turns.values() for turn in some], began)
    return figure


def _hit_rates(axes: Axes, turns: Mapping[Arm, Sequence[TurnSeen]], began: float) -> None:
    for arm, some in turns.items():
        told = [turn for turn in some if turn.cached_tokens is not None and turn.prompt_tokens]
        if told:
            look = ARMS[arm]
            axes.plot(
                [(turn.at_s - began) / _S_PER_MIN for turn in told],
                [100 * (turn.cached_tokens or 0) / turn.prompt_tokens for turn in told],
                linestyle="",
                marker=look.marker,
                color=look.colour,
                alpha=0.85,
                markerfacecolor="none" if arm is Arm.FLOOR else look.colour,
                label=look.label,
            )
    axes.set_ylim(-4, 135)
    axes.set_yticks(range(0, 101, 25))
    axes.set_ylabel("prompt tokens not computed (%)")
    axes.set_xlabel("time since the cluster's first counted turn (min)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", fontsize=8.5, ncols=2)


def _plan_mix(axes: Axes, turns: Sequence[TurnSeen], began: float) -> None:
    span = max(turn.at_s for turn in turns) - began or 1.0
    bins = max(1, min(_BINS, len(turns) // 2))
    width = span / bins / _S_PER_MIN
    found: list[dict[str, int]] = [{} for _ in range(bins)]
    for turn in turns:
        plans = found[min(bins - 1, int((turn.at_s - began) / span * bins))]
        plans[turn.plan] = plans.get(turn.plan, 0) + 1
    for plan, look in PLANS.items():
        if not any(plan in plans for plans in found):
            continue
        heights = [100 * plans.get(plan, 0) / (sum(plans.values()) or 1) for plans in found]
        before = list(PLANS)[: list(PLANS).index(plan)]
        bases = [100 * sum(plans.get(one, 0) for one in before) / (sum(plans.values()) or 1) for plans in found]
        places = [(index + 0.5) * width for index in range(bins)]
        axes.bar(
            places, heights, width, bottom=bases, color=look.colour, hatch=look.hatch, edgecolor="white",
            linewidth=0.3, label=look.label,
        )  # fmt: skip
    axes.set_ylim(0, 125)
    axes.set_yticks(range(0, 101, 25))
    axes.set_ylabel("turns by the router's plan (%)")
    axes.set_xlabel("time since the cluster's first counted turn (min)")
    axes.legend(loc="upper left", fontsize=8.5, ncols=4)


FIGURES: Final[Mapping[str, Callable[[Results], Figure]]] = {
    "ttft": _ttft,
    "prefill-split": _split,
    "reuse-over-time": _timeline,
}
