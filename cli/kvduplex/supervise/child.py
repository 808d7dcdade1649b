"""One supervised program, seen through its guard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvduplex.supervise import guard
from kvduplex.supervise.logs import rotate
from kvduplex.supervise.unit import Unit

__all__ = ["Child", "Fate"]

_SWEEP_TICK_S = 0.02
_SWEEP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Fate:
    """How a program ended.

    Attributes:
        text: For people, e.g. ``ended with exit code 1``.
    """

    text: str


class Child:
    """Runs a unit under a guard.

    Args:
        unit: What to run.
        environment: What the program inherits; the unit's own is added.
        grace_s: Seconds between asking the program to end and forcing it.
    """

    def __init__(self, unit: Unit, *, environment: Mapping[str, str], grace_s: float) -> None:
        self.unit = unit
        self._environment = {**environment, **unit.environment}
        self._grace_s = grace_s
        self._guard: asyncio.subprocess.Process | None = None
        self._pid: int | None = None
        self._fate: asyncio.Future[Fate] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the program; None before it started."""
        return self._pid

    @property
    def fate(self) -> asyncio.Future[Fate]:
        """Done as soon as the program has ended; what it left behind may still be ending."""
        return self._fate

    async def start(self) -> None:
        """Rotate the log, make the scratch folder and start the program under its guard.

        Raises:
            OSError: The log or the scratch folder cannot be made.
        """
        rotate(self.unit.log)
        if self.unit.scratch is not None:
            shutil.rmtree(self.unit.scratch, ignore_errors=True)  # of a run whose guard was killed
            self.unit.scratch.mkdir(parents=True, mode=0o700)
        spawning = asyncio.ensure_future(self._spawn())
        try:
            await asyncio.shield(spawning)
        except asyncio.CancelledError:
            await spawning  # half a start could not be ended
            raise

    def ask(self, command: str) -> None:
        """Tell the guard ``stop`` or ``kill``; without effect when it is gone."""
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._guard.stdin.write(f"{command}\n".encode())

    async def gone(self) -> None:
        """Wait until the program and everything that it started has ended."""
        if self._guard is None:
            return
        clean = await self._guard.wait() == 0
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        if self._reader is not None:
            await self._reader
        if not clean:
            await self._sweep(self._guard.pid)

    async def destroy(self) -> None:
        """Kill the guard and, with it or after it, all that it guarded. The last resort."""
        if self._guard is not None and self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._guard.kill()
            await self.gone()

    def _guard_argv(self) -> list[str]:
        options = ["--log", str(self.unit.log), "--grace", str(self._grace_s)]
        if self.unit.scratch is not None:
            options += ["--remove", str(self.unit.scratch)]
        return [sys.executable, "-I", "-S", guard.__file__, *options, "--", *self.unit.argv]

    async def _spawn(self) -> None:
        with self.unit.log.open("ab") as log:
            self._guard = await asyncio.create_subprocess_exec(
                *self._guard_argv(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # the terminal's Ctrl-C reaches the supervisor alone, which asks in order
            )
        self._reader = asyncio.create_task(self._follow(self._guard), name=f"fate of {self.unit.name}")

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Read the guard's words until it has ended."""
        assert process.stdout is not None  # noqa: S101 - it was asked for
        async for line in process.stdout:
            word, _, value = line.decode().strip().partition(" ")
            if word == "pid":
                self._pid = int(value)
            else:
                self._settle(_fate_of(word, value))
        self._settle(Fate("was left by its guard, which was killed"))

    def _settle(self, fate: Fate) -> None:
        if not self._fate.done():
            self._fate.set_result(fate)

    async def _sweep(self, session: int) -> None:
        """Kill what a guard that was itself killed left behind: everything in its session."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SWEEP_TIMEOUT_S):
                while members := _members_of(session):
                    for pid in members:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(_SWEEP_TICK_S)
        if self.unit.scratch is not None:
            shutil.rmtree(self.unit.scratch, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.unit.scratch.parent.rmdir()


def _fate_of(word: str, value: str) -> Fate:
    match word:
        case "exit":
            return Fate(f"ended with exit code {value}")
        case "signal":
            return Fate(f"was killed by {signal.Signals(int(value)).name}")
        case _:
            return Fate(f"could not be started: {value}")


def _members_of(session: int) -> list[int]:
    """Live processes of a session."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[3]) == session and fields[0] != b"Z":
                    members.append(int(entry.name))
    return members
