"""The few facts a loader asks of a shared library, read from the file itself: no binutils, no loading, no code run.

Only 64-bit little-endian ELF, which is what every supported host runs. Layout: System V ABI, chapter 5 (dynamic
section), and the Linux Standard Base's symbol versioning.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["ElfError", "SharedLibrary", "mentions_symbol", "read_shared_library"]

_MAGIC = b"\x7fELF\x02\x01"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 1, 5, 15, 29
_DT_VERDEF, _DT_VERDEFNUM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_VER_FLG_BASE = 1
_ENTRY_LIMIT = 4096  # a damaged file must not keep a probe busy


class ElfError(Exception):
    """The file is not a shared library this reader understands."""


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """What the dynamic loader would learn from a library.

    Attributes:
        needed: Names of libraries it links, e.g. ``libfabric.so.1``.
        search_path: Its ``RUNPATH``, or ``RPATH``, entries; ``$ORIGIN`` is kept as written.
        required_versions: Symbol versions it asks of each library, e.g. ``{"libfabric.so.1": {"FABRIC_1.7"}}``.
        provided_versions: Symbol versions it defines itself.
    """

    needed: tuple[str, ...]
    search_path: tuple[str, ...]
    required_versions: Mapping[str, frozenset[str]]
    provided_versions: frozenset[str]


def read_shared_library(path: Path) -> SharedLibrary:
    """Read the dynamic section of the library at `path`.

    Raises:
        ElfError: The file is no 64-bit little-endian ELF library, or is damaged.
        OSError: It cannot be read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).library()
    except (struct.error, IndexError, ValueError, OverflowError) as error:  # mmap refuses empty files: ValueError
        raise ElfError(f"{path}: damaged or empty library: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        if data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("not a 64-bit little-endian ELF file")
        self._data = data
        self._segments = list(self._program_headers())
        self._dynamic = list(self._dynamic_entries())
        self._strings = self._offset(self._first(_DT_STRTAB))

    def library(self) -> SharedLibrary:
        return SharedLibrary(
            needed=tuple(self._string(value) for tag, value in self._dynamic if tag == _DT_NEEDED),
            search_path=self._search_path(),
            required_versions=MappingProxyType(dict(self._required())),
            provided_versions=frozenset(self._provided()),
        )

    def _program_headers(self) -> Iterator[tuple[int, int, int, int]]:
        table, size, count = struct.unpack_from("<32xQ14xHH", self._data, 0)
        for index in range(count):
            kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", self._data, table + index * size)
            yield kind, offset, address, length

    def _dynamic_entries(self) -> Iterator[tuple[int, int]]:
        start = next((offset for kind, offset, _, _ in self._segments if kind == _PT_DYNAMIC), None)
        if start is None:
            raise ValueError("no dynamic section")
        for index in range(_ENTRY_LIMIT):
            tag, value = struct.unpack_from("<QQ", self._data, start + 16 * index)
            if tag == 0:
                return
            yield tag, value

    def _first(self, wanted: int) -> int:
        return next((value for tag, value in self._dynamic if tag == wanted), 0)

    def _offset(self, address: int) -> int:
        for kind, offset, start, length in self._segments:
            if kind == _PT_LOAD and start <= address < start + length:
                return address - start + offset
        raise ValueError(f"address {address:#x} lies in no segment")

    def _string(self, index: int) -> str:
        start = self._strings + index
        end = self._data.find(b"\0", start)
        if end < 0:
            raise ValueError("unterminated string")
        return self._data[start:end].decode("ascii", "replace")

    def _search_path(self) -> tuple[str, ...]:
        index = self._first(_DT_RUNPATH) or self._first(_DT_RPATH)
        return tuple(part for part in self._string(index).split(":") if part) if index else ()

    def _required(self) -> Iterator[tuple[str, frozenset[str]]]:
        count = min(self._first(_DT_VERNEEDNUM), _ENTRY_LIMIT)
        position = self._offset(self._first(_DT_VERNEED)) if count else 0
        for _ in range(count):
            entries, file, first, following = struct.unpack_from("<2xHIII", self._data, position)
            yield self._string(file), frozenset(self._required_of(position + first, entries))
            position += following

    def _required_of(self, position: int, count: int) -> Iterator[str]:
        for _ in range(count):
            name, following = struct.unpack_from("<8xII", self._data, position)
            yield self._string(name)
            position += following

    def _provided(self) -> Iterator[str]:
        count = min(self._first(_DT_VERDEFNUM), _ENTRY_LIMIT)
        position = self._offset(self._first(_DT_VERDEF)) if count else 0
        for _ in range(count):
            flags, first, following = struct.unpack_from("<2xH8xII", self._data, position)
            if not flags & _VER_FLG_BASE:
                (name,) = struct.unpack_from("<I", self._data, position + first)
                yield self._string(name)
            position += following


def mentions_symbol(path: Path, symbol: str) -> bool:
    """Whether `symbol` stands in the string table of the library at `path`; False when the file cannot be read.

    A string of that exact spelling proves neither import nor export, but its absence proves that the library cannot
    define it, which is all that a check of a library's age needs.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"\0" + symbol.encode("ascii") + b"\0") >= 0
    except (OSError, ValueError):
        return False
