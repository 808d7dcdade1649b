"""The run's record: JSON lines, each written out at once, so that whatever stops a run costs one segment at most.

A line's ``kind`` says what it is. ``run`` opens every sitting with its provenance; ``turn`` is one turn; ``segment``
closes a segment, and turns without it do not count; ``end`` closes a sitting and says whether the run is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from kvduplex_bench.errors import BenchError

__all__ = ["FORMAT", "Journal", "read_lines"]

FORMAT = 1
_START: Final = b'{"kind":"run"'


@dataclass(slots=True)
class Journal:
    """An open record.

    Attributes:
        path: The file.
        done: Keys of the segments that are complete.
        sittings: Runs that have written to it, this one not included.
        complete: Whether an earlier sitting ended with everything done.
    """

    path: Path
    done: set[str] = field(default_factory=set)
    sittings: int = 0
    complete: bool = False
    _file: BinaryIO | None = None

    @classmethod
    def open(cls, path: Path, *, fingerprint: str) -> Self:
        """Begin a record, or go on with one of the same run.

        Args:
            path: The file; made with its folder when it is not there.
            fingerprint: Of everything that makes results comparable.

        Raises:
            BenchError: It belongs to another run, is no record, or cannot be written.
        """
        journal = cls(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                journal._take_up(fingerprint)
            journal._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error
        return journal

    def _take_up(self, fingerprint: str) -> None:
        _must_be_a_record(self.path)
        _drop_torn_line(self.path)
        for line in read_lines(self.path):
            if line["kind"] == "run":
                if not _matches(line, fingerprint):
                    self._begin_anew()
                    return
                self.sittings += 1
            elif line["kind"] == "segment":
                self.done.add(str(line["segment"]))
            elif line["kind"] == "end":
                self.complete = bool(line["complete"])

    def _begin_anew(self) -> None:
        """Empty the record of another run that measured nothing, like one whose cluster could not be reached."""
        if any(line["kind"] in ("turn", "segment") for line in read_lines(self.path)):
            raise BenchError(
                f"--output {self.path}: holds a run of another workload, cluster or version; "
                "give another file, or remove this one to measure anew"
            )
        self.path.write_bytes(b"")
        self.sittings, self.complete = 0, False

    def write(self, kind: str, **values: Any) -> None:
        """Append a line.

        Raises:
            BenchError: It cannot be written; what stands in the file stays.
        """
        if self._file is None:
            raise BenchError(f"{self.path}: the record is closed")
        line = json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"
        try:
            while line:  # a disk that fills takes a part first
                line = line[self._file.write(line) :]
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if kind == "segment":
            self.done.add(str(values["segment"]))

    def close(self) -> None:
        """Flush to the disk and close; twice is once."""
        if self._file is not None:
            with suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record, one at a time; a torn last line is left out.

    Raises:
        BenchError: The file cannot be read or is no record.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    return
                yield _parsed(path, number, raw)
    except OSError as error:
        raise BenchError(f"{path}: cannot be read ({error.strerror}); give the --output of a run") from error


def _parsed(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except ValueError as error:
        raise BenchError(f"{path}:{number}: not JSON ({error}); the file is damaged or no record of a run") from error
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise BenchError(
            f"{path}:{number}: not a line of a run's record; give the --output of kvduplex bench multiturn"
        )
    return line


def _matches(line: dict[str, Any], fingerprint: str) -> bool:
    return line.get("format") == FORMAT and line.get("fingerprint") == fingerprint


def _must_be_a_record(path: Path) -> None:
    """Leave a file alone that some other program wrote; a disk may have filled within a record's first bytes."""
    with path.open("rb") as file:
        start = file.read(len(_START))
    if not _START.startswith(start):
        raise BenchError(f"--output {path}: is no record of a run; give another file")


def _drop_torn_line(path: Path) -> None:
    """Cut what a full disk or a kill left of a line."""
    raw = path.read_bytes()[-(1 << 20) :]
    if raw and not raw.endswith(b"\n"):
        torn = len(raw) - (raw.rfind(b"\n") + 1)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - torn)


def _unwritable(path: Path, error: OSError) -> BenchError:
    return BenchError(
        f"--output {path}: cannot be written ({error.strerror}); what was measured so far is kept. "
        "Free some space and give the same command again to go on, or give another file"
    )
