"""Log files of supervised programs: rotated at each start, followed while loading, quoted when something dies."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from kvduplex.supervise.unit import Stage

__all__ = ["StageFollower", "probable_cause", "rotate", "tail"]

_KEEP = 3
_TAIL_BYTES = 64 * 1024
_CAUSE_BYTES = 4 * 1024 * 1024
_EXCEPTION = re.compile(r"(?:^|[\])] )(?P<text>(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure): \S.*)$")
# Says only that another process of the same engine failed, whose own exception stands further up.
_SECONDARY = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError")


def rotate(path: Path, keep: int = _KEEP) -> None:
    """Move ``x.log`` to ``x.log.1``, that to ``x.log.2`` and so on; the oldest beyond `keep` is overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generations = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, keep + 1))]
    for older, newer in zip(generations[:0:-1], generations[-2::-1], strict=True):
        with contextlib.suppress(FileNotFoundError):
            newer.replace(older)


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file; empty when it cannot be read."""
    return _end_of(path, _TAIL_BYTES).splitlines()[-lines:]


def probable_cause(path: Path) -> str | None:
    """The first exception that a log's end names, passing over those that only report another's; None without one."""
    matches = (_EXCEPTION.search(line) for line in _end_of(path, _CAUSE_BYTES).splitlines())
    texts = [match["text"] for match in matches if match]
    return next((text for text in texts if not _SECONDARY.search(text)), None)


def _end_of(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


class StageFollower:
    """Reads what was added to a log and tells which stage of its start a program has reached."""

    def __init__(self, path: Path, stages: Sequence[Stage]) -> None:
        self._path = path
        self._stages = stages
        self._offset = 0
        self._reached = -1

    @property
    def label(self) -> str:
        """The furthest stage seen so far."""
        return self._stages[self._reached].label if self._reached >= 0 else "starting"

    def update(self) -> str:
        """Read on, and return `label`."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
            complete = added.rfind(b"\n") + 1
            self._offset += complete
            self._advance(added[:complete].decode(errors="replace"))
        return self.label

    def _advance(self, text: str) -> None:
        for index in range(len(self._stages) - 1, self._reached, -1):
            if self._stages[index].mark in text:
                self._reached = index
                return
