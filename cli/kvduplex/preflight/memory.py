"""Whether the engines fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.interface import Finding

__all__ = ["ENGINE_BASE_BYTES", "available_bytes", "memory_findings"]

_GIB = 1 << 30
ENGINE_BASE_BYTES = 2 * _GIB
"""Resident memory of an engine's three processes without weights and KV (measured: vLLM 0.32, CPU build)."""


def memory_findings(*, engines: int, kv_bytes: int, weight_bytes: int | None, available: int) -> list[Finding]:
    """Compare what engines need with what there is.

    Args:
        engines: Engines to be started.
        kv_bytes: KV cache of each.
        weight_bytes: Weights of each as they will lie in memory; None when unknown.
        available: What can be had without swapping.
    """
    each = ENGINE_BASE_BYTES + kv_bytes + (weight_bytes or 0)
    parts = f"2.0 base + {_gib(kv_bytes)} KV + {_gib(weight_bytes) if weight_bytes is not None else '?'} weights"
    expected = f"{_gib(engines * each)} GiB for {engines} engines ({parts} each)"
    seen = f"{_gib(available)} GiB available"
    fix = "--kv-space GIB makes the KV cache smaller; fewer engines or a smaller model also help"
    why = "the kernel ends engines that outgrow memory, without a word in their logs"
    if available < engines * each:
        return [fail("memory.available", seen, expected, why=why, fix=fix)]
    if weight_bytes is None:
        return [warn("memory.available", seen, f"{expected}, weights unknown", why=why, fix=fix)]
    return [ok("memory.available", seen, expected)]


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping, by the machine and by every control group of this process.

    Args:
        root: Folder that stands for ``/`` when control groups are read.
    """
    return min([int(psutil.virtual_memory().available), *_cgroup_headrooms(root)])


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """What each control group (version 2) on the way up still allows; caches that can be dropped count as free."""
    for folder in _cgroup_folders(root):
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            yield max(0, limit - used + _droppable(folder / "memory.stat"))


def _cgroup_folders(root: Path) -> Iterator[Path]:
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            group = PurePosixPath(line[3:])
            for level in (group, *group.parents):
                yield mount / str(level).lstrip("/")


def _droppable(path: Path) -> int:
    fields = (line.split() for line in _text(path).splitlines())
    return sum(int(field[1]) for field in fields if field[:1] == ["inactive_file"])


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"
