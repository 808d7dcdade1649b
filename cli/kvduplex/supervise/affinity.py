"""Keeps a program's threads on the cores that it was given.

A CPU engine moves its main thread, which computes, to the last core of each NUMA node when its KV connector starts
(vLLM 0.32 source, ``nixl/base_worker.py``: cores reserved for transfers). Every engine of a machine then computes on
that one core while the others idle: with two engines on two busy cores, prefills took three times as long.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import psutil

__all__ = ["confine"]


def confine(pid: int, cores: AbstractSet[int]) -> None:
    """Move threads of a process and its descendants back to `cores`.

    Threads that may run anywhere, or only on some of `cores`, are left as they are. Threads and processes that end
    meanwhile are passed over.

    Args:
        pid: The program.
        cores: Where its pinned threads belong.
    """
    anywhere = os.sched_getaffinity(0)
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            allowed = os.sched_getaffinity(thread)
            if not allowed <= cores and not allowed >= anywhere:
                os.sched_setaffinity(thread, cores)


def _threads(pid: int) -> Iterator[int]:
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(OSError):
                yield from [int(entry.name) for entry in Path(f"/proc/{process.pid}/task").iterdir()]
