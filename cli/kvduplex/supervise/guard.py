"""Stands between the supervisor and one program, so that nothing of that program outlives either.

Run as a script of its own (``python -I -S guard.py --log FILE --grace SECONDS [--remove FOLDER]... -- PROGRAM ...``);
it imports nothing but the standard library and stays at a few megabytes.

- Standard input is the lifeline: ``stop`` or its end (the supervisor died, however it died) asks the program to end,
  ``kill`` ends it at once.
- Standard output carries the program's fate, one line each: ``pid N``, then ``exit N``, ``signal N`` or ``failed WHY``.
- As a child subreaper it adopts what the program's processes leave behind, even those in sessions of their own, and
  exits only when none is left. Then it deletes the folders named, the ones around them if that leaves those empty,
  and the shared memory that only the ended processes had mapped.
- The program is killed by the kernel when the guard itself is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 0.05
_ORPHAN_GRACE_S = 1.0
_TRACKER_GRACE_S = 2.0
# Python's trackers unlink the named semaphores and shared memory that others left, once those others are gone.
_TRACKER = b"multiprocessing.resource_tracker"
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - looked at, never created
_LIBC = ctypes.CDLL(None, use_errno=True)


class Guard:
    """Runs one program and everything that it starts.

    Args:
        argv: The program.
        log: File that its output is appended to.
        grace_s: Seconds between the polite and the forced end.
        remove: Folders to delete at the end.
    """

    def __init__(self, argv: Sequence[str], *, log: Path, grace_s: float, remove: Sequence[Path]) -> None:
        self._argv = argv
        self._log = log
        self._grace_s = grace_s
        self._remove = remove
        self._main: int | None = None
        self._kill_at: float | None = None
        self._shared_memory: set[str] = set()

    def run(self) -> None:
        """Start the program and return when nothing of it is left."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with selectors.PollSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(_child_signals(), selectors.EVENT_READ)
            self._start()
            while self._reap():
                self._handle(selector)
                self._kill_when_due()
        self._clean()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            try:
                program = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
                )
            except OSError as error:
                _tell(f"failed {error}")
                return
        self._main = program.pid
        program.returncode = 0  # waitpid below reaps it, not Popen
        _tell(f"pid {program.pid}")

    def _handle(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_TICK_S if self._kill_at is not None else None):
            if key.fd != 0:
                if signal.SIGTERM in os.read(key.fd, 4096):
                    self._stop()
                continue
            command = os.read(0, 4096)
            if not command:
                selector.unregister(0)
            self._kill() if b"kill" in command else self._stop()

    def _stop(self) -> None:
        """Ask the program to end; it ends its own children in the order it wants."""
        if self._kill_at is None:
            self._note_shared_memory()
            self._kill_at = time.monotonic() + self._grace_s
            if self._main is not None:
                os.kill(self._main, signal.SIGTERM)

    def _kill(self) -> None:
        self._note_shared_memory()
        now = time.monotonic()
        self._kill_at = now if self._kill_at is None else min(now, self._kill_at)

    def _kill_when_due(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._note_shared_memory()
            late = time.monotonic() >= self._kill_at + _TRACKER_GRACE_S
            doomed = [pid for pid in _descendants(os.getpid()) if late or not _is_tracker(pid)]
            _signal_all(doomed, signal.SIGKILL)

    def _reap(self) -> bool:
        """Collect whatever has ended; False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._main:
                self._main_ended(status)

    def _main_ended(self, status: int) -> None:
        """Tell of it, and ask what it left behind to end as well."""
        self._main = None
        code = os.waitstatus_to_exitcode(status)
        _tell(f"exit {code}" if code >= 0 else f"signal {-code}")
        self._note_shared_memory()
        _signal_all(_descendants(os.getpid()), signal.SIGTERM)
        due = time.monotonic() + min(self._grace_s, _ORPHAN_GRACE_S)
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def _note_shared_memory(self) -> None:
        self._shared_memory |= _mapped_shared_memory(_descendants(os.getpid()))

    def _clean(self) -> None:
        if self._shared_memory:
            for path in self._shared_memory - _mapped_shared_memory(_processes()):
                with contextlib.suppress(OSError):
                    Path(path).unlink()
        for folder in self._remove:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # the last guard of a cluster leaves the folder around it empty
                folder.parent.rmdir()


def _tell(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone; the lifeline says so too
        os.write(1, f"{line}\n".encode())


def _child_signals() -> int:
    """A descriptor that becomes readable with the number of each SIGCHLD and SIGTERM."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the program would inherit
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _descendants(root: int) -> list[int]:
    """Processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            children.setdefault(int(fields[1]), []).append(pid)
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found |= {line[line.index(_SHARED_MEMORY) :] for line in lines if _SHARED_MEMORY in line}
    return {path for path in found if not path.endswith(" (deleted)")}


def main(argv: Sequence[str]) -> None:
    """Read the arguments and guard the program that they name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--remove", type=Path, action="append", default=[])
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(argv)
    Guard(options.program, log=options.log, grace_s=options.grace, remove=options.remove).run()


if __name__ == "__main__":
    main(sys.argv[1:])
