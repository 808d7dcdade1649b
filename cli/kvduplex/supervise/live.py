"""The live table of a start, for terminals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

__all__ = ["LiveProgress", "live_progress"]

_REFRESH_HZ = 4  # each refresh costs a few milliseconds that the engines could use


@dataclass(slots=True)
class _Row:
    label: str
    began: float
    took: float | None = None


class LiveProgress:
    """A table of every program's stage and seconds, redrawn until `close`."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._spinner = Spinner("dots")
        self._live = Live(self, console=console, refresh_per_second=_REFRESH_HZ)
        self._live.start()

    def stage(self, name: str, label: str) -> None:
        """Show `label` in the row of `name`."""
        self._rows.setdefault(name, _Row(label, self._clock())).label = label

    def ready(self, name: str) -> None:
        """Stop the clock of `name`."""
        row = self._rows.setdefault(name, _Row("", self._clock()))
        row.label, row.took = "ready", self._clock() - row.began

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the last state on the screen. Idempotent."""
        self._live.stop()

    def __rich__(self) -> ConsoleRenderable:
        """Draw the table as of now."""
        table = Table.grid(padding=(0, 2))
        for name, row in self._rows.items():
            done = row.took is not None
            seconds = row.took if row.took is not None else self._clock() - row.began
            table.add_row(
                Text("✓", "green") if done else self._spinner,
                Text(name, "bold"),
                Text(f"{seconds:5.1f} s", "dim"),
                Text(row.label, "green" if done else ""),
            )
        return table


@contextmanager
def live_progress() -> Iterator[LiveProgress]:
    """Draw on standard error until the block ends; the last state stays on the screen."""
    progress = LiveProgress(Console(stderr=True))
    try:
        yield progress
    finally:
        progress.close()
