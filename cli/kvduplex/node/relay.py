"""Copies what a program writes to its log file to another place, and keeps the file short."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

__all__ = ["Relay", "relaying"]

_LOOK_S = 0.5
_CUT_AT_BYTES = 16 * 1024 * 1024
_BLOCK_BYTES = 1024 * 1024


class Relay:
    """Follows one file that others append to.

    Lines that are written between the last reading and a cut are lost, as with any copy that cuts its source.

    Args:
        path: The file; it may appear later, and may be replaced.
        to: Gets what is added to the file from now on.
        cut_at_bytes: Size at which the file is emptied.
    """

    def __init__(self, path: Path, *, to: IO[bytes], cut_at_bytes: int = _CUT_AT_BYTES) -> None:
        self._path = path
        self._to = to
        self._cut_at_bytes = cut_at_bytes
        self._offset = 0
        self._inode: int | None = None

    def copy(self) -> None:
        """Copy what was added since the last call."""
        try:
            with self._path.open("r+b") as file:
                self._follow(file)
        except FileNotFoundError:
            return

    def _follow(self, file: IO[bytes]) -> None:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
        file.seek(self._offset)
        while block := file.read(_BLOCK_BYTES):
            self._to.write(block)
            self._offset += len(block)
        self._to.flush()
        if self._offset >= self._cut_at_bytes:
            # Writers append, so they go on at the new end.
            file.truncate(0)
            self._offset = 0


@contextlib.asynccontextmanager
async def relaying(path: Path, *, to: IO[bytes], when: bool = True) -> AsyncIterator[None]:
    """Copy what is added to `path` while the block runs, and the rest at its end; nothing unless `when`."""
    if not when:
        yield
        return
    relay = Relay(path, to=to)
    task = asyncio.create_task(_keep_copying(relay))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        relay.copy()


async def _keep_copying(relay: Relay) -> None:
    while True:
        relay.copy()
        await asyncio.sleep(_LOOK_S)
