"""Tasks beside each other, a process each, so that none waits for another's interpreter."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final, TypeVar

from kvduplex_bench.errors import BenchError
from kvduplex_bench.processes import unwind_on_sigterm

__all__ = ["run_beside"]

_T = TypeVar("_T")
_END_S: Final = 60.0
"""Seconds a task has to end what it started once it is told to end."""


def run_beside(tasks: Sequence[Callable[[], _T]], at_once: int, on_result: Callable[[int, _T], None]) -> None:
    """Run all tasks, so many at a time, in order; what they and their results are made of must be picklable.

    Args:
        tasks: What to do.
        at_once: How many run at the same time, 1 or more.
        on_result: Told a task's place and result when it is done, in this process.

    Raises:
        BenchError: A task raised one, or its process ended without a result; the others are ended.
    """
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Connection, tuple[int, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                place, task = waiting.pop()
                end, process = _started(task)
                running[end] = (place, process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)  # noqa: S101 - nothing else is waited for
                place, process = running[ready]
                result = _received(ready, process)
                del running[ready]
                on_result(place, result)
    finally:
        for _, process in running.values():
            process.terminate()
        for end, (_, process) in running.items():
            _end(process)
            end.close()


def _started(task: Callable[[], object]) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, task))
    process.start()
    theirs.close()
    return ours, process


def _child(end: Connection, task: Callable[[], object]) -> None:
    unwind_on_sigterm()
    try:
        end.send((True, task()))
    except BenchError as error:
        end.send((False, str(error)))
    except KeyboardInterrupt:  # the terminal tells all processes; the first of them says so
        sys.exit(130)


def _received(end: Connection, process: SpawnProcess) -> Any:
    try:
        good, told = end.recv()
    except EOFError:
        _end(process)
        raise BenchError(f"a process beside this one ended with status {process.exitcode} and no result") from None
    finally:
        end.close()
    _end(process)
    if not good:
        raise BenchError(told)
    return told


def _end(process: SpawnProcess) -> None:
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()
