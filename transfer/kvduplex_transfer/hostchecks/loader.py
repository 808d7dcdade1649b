"""Where the dynamic loader of an engine would find a library, without loading anything.

The order is ld.so(8)'s: the library's own search path, ``LD_LIBRARY_PATH``, the cache, the default folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from kvduplex_transfer.interface import Host

__all__ = ["Loader", "real_path"]

_CACHE_LINE = re.compile(r"^\s+(?P<name>\S+) \((?P<kind>[^)]*)\) => (?P<path>\S+)$", re.MULTILINE)
_DEFAULT_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_LDCONFIG = (["ldconfig", "-p"], ["/sbin/ldconfig", "-p"])  # /sbin is not on every user's PATH


class Loader:
    """Finds libraries as a process with the host's environment would.

    Args:
        host: Machine to look at.
        preloaded: Folders whose libraries the engine has mapped before it needs them, e.g. those that torch brings.
    """

    def __init__(self, host: Host, *, preloaded: Iterable[str] = ()) -> None:
        self._host = host
        self._cache = _read_cache(host)
        self._preloaded = tuple(preloaded)
        self._environment = tuple(part for part in host.environ.get("LD_LIBRARY_PATH", "").split(":") if part)

    @property
    def cache_readable(self) -> bool:
        """Whether ``ldconfig`` answered at all."""
        return bool(self._cache)

    def find(self, name: str, *, search_path: Iterable[str] = ()) -> str | None:
        """Path of the library that would be loaded as `name`, or None.

        Args:
            name: E.g. ``libfabric.so.1``.
            search_path: Search path of the library that needs it, ``$ORIGIN`` already replaced.
        """
        in_folders = self._in_folders((*search_path, *self._environment), name)
        return in_folders or self._cached(name) or self._in_folders((*_DEFAULT_FOLDERS, *self._preloaded), name)

    def _in_folders(self, folders: Iterable[str], name: str) -> str | None:
        candidates = (str(PurePosixPath(folder) / name) for folder in folders)
        return next((path for path in candidates if self._host.glob(path)), None)

    def _cached(self, name: str) -> str | None:
        path = self._cache.get(name)
        return path if path and self._host.glob(path) else None


def real_path(host: Host, path: str) -> Path:
    """The file behind a path of `host`, for readers that need bytes."""
    return host.root / path.lstrip("/")


def _read_cache(host: Host) -> Mapping[str, str]:
    for argv in _LDCONFIG:
        found: dict[str, str] = {}
        for line in _CACHE_LINE.finditer(host.run(argv).stdout):
            if "x86-64" in line["kind"] or "AArch64" in line["kind"]:
                found.setdefault(line["name"], line["path"])
        if found:
            return MappingProxyType(found)
    return MappingProxyType({})
