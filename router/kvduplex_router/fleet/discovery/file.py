"""Engines listed in a file that is watched for changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from kvduplex_router.config import EngineEntries, Section
from kvduplex_router.fleet.discovery.source import DiscoveryError
from kvduplex_router.fleet.engine import EngineRole
from kvduplex_router.fleet.members import Member

__all__ = ["FileSource"]

_FORM = "write prefill:, decode: or engines: with a list of URLs"


class _Lists(Section):
    prefill: EngineEntries = ()
    decode: EngineEntries = ()
    engines: EngineEntries = ()


class FileSource:
    """A `Source` that reads YAML or JSON: ``prefill``, ``decode`` and ``engines``, as in the configuration.

    An empty file is refused, for that is what a file looks like while it is being written.
    """

    missing_after = 1

    def __init__(self, path: Path, *, interval_s: float) -> None:
        self.name = f"file:{path}"
        self.interval_s = interval_s
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._members: Sequence[Member] = ()

    async def look(self) -> Sequence[Member]:
        """See `Source.look`."""
        return await asyncio.to_thread(self._look)

    async def close(self) -> None:
        """See `Source.close`."""

    def _look(self) -> Sequence[Member]:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - its identity and times in one call
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._members = _read(self._path.read_text(encoding="utf-8"))
                self._seen = seen
        except (OSError, UnicodeDecodeError) as error:
            raise DiscoveryError(f"{self._path}: {getattr(error, 'strerror', None) or error}") from None
        return self._members


def _read(text: str) -> Sequence[Member]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DiscoveryError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise DiscoveryError("nested without end; an alias stands inside what it names") from None
    if value is None:
        raise DiscoveryError(f"it is empty; {_FORM}, an empty list for none")
    try:
        lists = _Lists.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
        raise DiscoveryError(f"{place}: {first['msg'].removeprefix('Value error, ')}; {_FORM}") from None
    roles = (
        (EngineRole.PREFILL, lists.prefill),
        (EngineRole.DECODE, lists.decode),
        (EngineRole.REPLICA, lists.engines),
    )
    return [Member.of(role, entry) for role, entries in roles for entry in entries]
