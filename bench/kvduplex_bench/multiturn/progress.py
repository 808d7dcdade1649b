"""What a run tells while it goes on: one line a segment, and on a terminal a bar with the time that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvduplex_bench.multiturn.segment import Point, Segment
from kvduplex_bench.stats import percentile

__all__ = ["Reporter", "reporting"]


class Reporter:
    """Tells of a run; on standard error, so that results may go to standard output."""

    def __init__(self, console: Console, bar: Progress, task: TaskID) -> None:
        self._console, self._bar, self._task = console, bar, task

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, point: Point) -> None:
        """A segment begins."""
        self._bar.update(self._task, description=_named(point))

    def end(self, point: Point, found: Segment) -> None:
        """A segment is complete."""
        self._bar.advance(self._task)
        self.say(f"{_named(point)}: {_result(found)}")


@contextmanager
def reporting(console: Console, *, total: int, done: int) -> Iterator[Reporter]:
    """Show progress for the length of the block.

    Args:
        console: Where.
        total: Segments of the whole run.
        done: Those that an earlier sitting did.
    """
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    # Twice a second: drawing must not show in the client's share of a core.
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as bar:
        yield Reporter(console, bar, bar.add_task("", total=total, completed=done))


def _named(point: Point) -> str:
    return f"[{point.repeat + 1}] {point.setting}, {point.prefix_tokens:,} tokens, {point.arm}"


def _result(found: Segment) -> str:
    good = [turn.reply for turn in found.turns if turn.reply is not None]
    if not good:
        return "every turn failed: " + (found.turns[-1].error if found.turns else "none was played")
    text = f"TTFT {percentile([reply.ttft_s for reply in good], 50) * 1e3:,.0f} ms"
    if found.counted:
        text += f", {found.counted.pulled_tokens:,} tokens pulled, {found.counted.computed_tokens:,} computed"
    if found.comparison:
        text += f", answer {found.comparison.verdict}"
    failed = len(found.turns) - len(good)
    return text + (f", {failed} turns FAILED" if failed else "")
