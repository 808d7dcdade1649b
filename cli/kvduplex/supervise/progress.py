"""Shows how far each program's start has come: a live table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from kvduplex.console import note

__all__ = ["PlainProgress", "Progress", "show_progress"]


class Progress(Protocol):
    """Told by the supervisor what happens."""

    def stage(self, name: str, label: str) -> None:
        """Program `name` has reached a stage; may be told again and again."""

    def ready(self, name: str) -> None:
        """Program `name` answers."""

    def say(self, text: str) -> None:
        """Something else worth a line."""

    def close(self) -> None:
        """Nothing is loading any more: leave the terminal alone, except for `say`."""


class PlainProgress:
    """One line for each change, with the seconds since the start."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, write: Callable[[str], None] = note) -> None:
        self._clock = clock
        self._write = write
        self._began = clock()
        self._last: dict[str, str] = {}

    def stage(self, name: str, label: str) -> None:
        """Write `label` when it differs from the last one of `name`."""
        if self._last.get(name) != label:
            self._last[name] = label
            self._line(f"{name}: {label}")

    def ready(self, name: str) -> None:
        """Write that `name` is ready."""
        self._line(f"{name}: ready")

    def say(self, text: str) -> None:
        """Write `text`."""
        self._line(text)

    def close(self) -> None:
        """Nothing to do: nothing is redrawn."""

    def _line(self, text: str) -> None:
        self._write(f"[{self._clock() - self._began:5.1f} s] {text}")


@contextmanager
def show_progress(*, plain: bool) -> Iterator[Progress]:
    """Progress on standard error: live when that is a terminal and `plain` is not asked for."""
    if plain or not sys.stderr.isatty():
        yield PlainProgress()
        return
    from kvduplex.supervise.live import live_progress  # noqa: PLC0415 - rich is slow to import and often not needed

    with live_progress() as progress:
        yield progress
