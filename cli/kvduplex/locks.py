"""Advisory file locks that the kernel releases when their holder dies, and that name the holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["LockHeldError", "file_lock"]

_RETRY_S = 0.05


class LockHeldError(Exception):
    """Another process held the lock until the deadline.

    Attributes:
        path: The lock file.
        holder: What the holder wrote about itself; empty when it wrote nothing.
    """

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder or 'another process'}")
        self.path = path
        self.holder = holder


@contextlib.contextmanager
def file_lock(
    path: Path,
    *,
    timeout_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    remove: bool = False,
) -> Iterator[None]:
    """Hold an exclusive lock on `path` inside the ``with`` block; children do not inherit it.

    Args:
        path: Lock file; made, with its folder, when absent.
        timeout_s: Seconds to wait for another holder; 0 tries once.
        clock: Monotonic seconds.
        sleep: How to wait between attempts.
        remove: Whether to delete the file at the end.

    Raises:
        LockHeldError: The deadline passed.
        OSError: The file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _lock_before(path, clock() + timeout_s, clock, sleep)
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()}".encode(), 0)
        yield
    finally:
        if remove:
            path.unlink(missing_ok=True)
        os.close(file)


def _lock_before(path: Path, deadline: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> int:
    while (file := _try_lock(path)) is None:
        if clock() >= deadline:
            raise LockHeldError(path, _holder(path))
        sleep(_RETRY_S)
    return file


def _try_lock(path: Path) -> int | None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or deleted by its last holder between our open and our lock
    os.close(file)
    return None


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
