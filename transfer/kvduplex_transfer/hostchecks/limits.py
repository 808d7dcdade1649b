"""Limits of the process that engines inherit: locked memory, open files, huge pages."""

from __future__ import annotations

import re

from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.interface import Finding, Host

__all__ = ["check_huge_pages", "check_locked_memory", "check_open_files"]

_LIMITS = "/proc/self/limits"
_MEMINFO = "/proc/meminfo"
_OPEN_FILES = 8192  # a 16-rail engine with 64 workers holds a few hundred; the rest are client sockets


def check_locked_memory(host: Host) -> list[Finding]:
    """RDMA pins what it transfers, so the limit of locked memory must not exist."""
    soft = _limit(host, "Max locked memory")
    expected = "unlimited"
    if soft is None:
        return [
            warn(
                "limits.memlock",
                f"{_LIMITS} is unreadable",
                expected,
                why="memory registration fails when too little may be locked",
                fix="check `ulimit -l`",
            )
        ]
    if soft == "unlimited":
        return [ok("limits.memlock", f"unlimited ({_LIMITS})", expected)]
    return [
        fail(
            "limits.memlock",
            f"{_human(int(soft))} ({_LIMITS})",
            expected,
            why="every KV block is pinned for RDMA; registration fails with ENOMEM past this limit",
            fix="under systemd: LimitMEMLOCK=infinity in the unit; in a shell: `ulimit -l unlimited` after putting "
            "`* - memlock unlimited` into /etc/security/limits.d/99-memlock.conf and logging in anew; "
            "in a container: --ulimit memlock=-1",
        )
    ]


def check_open_files(host: Host) -> list[Finding]:
    """Each worker holds descriptors for every rail, each client a socket."""
    soft = _limit(host, "Max open files")
    expected = f"at least {_OPEN_FILES}"
    if soft is None or soft == "unlimited" or int(soft) >= _OPEN_FILES:
        return [ok("limits.nofile", soft or "unknown", expected)]
    return [
        warn(
            "limits.nofile",
            f"{soft} ({_LIMITS})",
            expected,
            why="engines run out of descriptors under load and refuse connections",
            fix="under systemd: LimitNOFILE=65536 in the unit; in a shell: `ulimit -n 65536`",
        )
    ]


def check_huge_pages(host: Host) -> list[Finding]:
    """The EFA provider of libfabric takes its bounce buffers from the huge pages that the EFA installer reserves."""
    meminfo = host.read_text(_MEMINFO) or ""
    total, free = (_meminfo(meminfo, key) for key in ("HugePages_Total", "HugePages_Free"))
    expected = "a pool of 2 MiB pages, some of it free"
    if total and free:
        return [ok("limits.hugepages", f"{free} of {total} free ({_MEMINFO})", expected)]
    seen = f"HugePages_Total {total}, HugePages_Free {free} ({_MEMINFO})"
    return [
        warn(
            "limits.hugepages",
            seen,
            expected,
            why="the EFA provider falls back to small pages: it registers more of them, and starts more slowly",
            fix="`sudo sysctl -w vm.nr_hugepages=2048` (4 GiB), kept in /etc/sysctl.d/99-hugepages.conf; a pool that "
            "is there but used up is held by another process",
        )
    ]


def _limit(host: Host, name: str) -> str | None:
    match = re.search(rf"^{name}\s+(\S+)\s", host.read_text(_LIMITS) or "", re.MULTILINE)
    return match[1] if match else None


def _meminfo(text: str, key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _human(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} bytes"
