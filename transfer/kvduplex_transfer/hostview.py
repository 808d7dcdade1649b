"""Views of a machine for probes: the real one, or a folder tree that stands for one that is not here."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kvduplex_transfer.interface import CommandResult

__all__ = ["COMMANDS_FOLDER", "FixtureHost", "LocalHost", "command_slug"]

COMMANDS_FOLDER = ".commands"
"""Folder of a fixture tree that holds the recorded output of vendor tools."""

_READ_LIMIT = 1 << 20  # probes read attributes and tables; a larger file is a mistake and must not fill memory
_REAP_S = 1.0


class _Tree:
    """The file half of a `Host`: reading below a root, following links as the machine itself would."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self._root = root.resolve()
        self._environ = MappingProxyType(dict(environ))

    @property
    def root(self) -> Path:
        """Folder that stands for ``/``."""
        return self._root

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment the engines would inherit."""
        return self._environ

    def read_text(self, path: str) -> str | None:
        """Content of an absolute path under `root`, at most 1 MiB, or None when it is absent or unreadable."""
        located = self._locate(path)
        if located is None:
            return None
        try:
            with located.open("rb") as file:
                return file.read(_READ_LIMIT).decode(errors="replace")
        except OSError:  # sysfs answers EINVAL, EIO or EACCES for attributes that are there but have no value
            return None

    def glob(self, pattern: str) -> list[str]:
        """Sorted absolute paths, as on the host, that match an absolute pattern; hidden files only if asked for."""
        # glob.glob, because Path.glob raises when an entry of /proc or /sys disappears while it looks.
        if self._root == Path("/"):
            return sorted(glob.glob(pattern))  # noqa: PTH207
        matches = glob.glob(pattern.lstrip("/"), root_dir=self._root)  # noqa: PTH207
        return sorted(f"/{match}" for match in matches if self._locate(f"/{match}") is not None)

    def _locate(self, path: str) -> Path | None:
        """The real file behind `path`, or None when a link leads out of the tree."""
        if self._root == Path("/"):
            return Path(path)
        candidate = self._root / path.lstrip("/")
        if candidate.is_symlink() and (target := candidate.readlink()).is_absolute():
            candidate = self._root / str(target).lstrip("/")
        resolved = candidate.resolve()
        return resolved if resolved.is_relative_to(self._root) else None


class LocalHost(_Tree):
    """This machine, or one mounted at `root`.

    Args:
        root: Folder to read below.
        environ: Environment that engines would inherit; the process's own when not given.
    """

    def __init__(self, root: Path = Path("/"), *, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(root, os.environ if environ is None else environ)

    def run(self, argv: Sequence[str], timeout_s: float = 5.0) -> CommandResult:
        """Run a read-only tool: 127 when it is missing, 126 when it may not be run, 124 past `timeout_s` seconds."""
        try:
            process = self._start(argv)
        except FileNotFoundError:
            return CommandResult(127, "", f"{argv[0]}: not found")
        except OSError as error:
            return CommandResult(126, "", f"{argv[0]}: {error.strerror}")
        return _finish(process, argv[0], timeout_s)

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        # A session of its own, so that at the deadline the tool's children end with it.
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(self.environ),
            errors="replace",
            start_new_session=True,
        )


class FixtureHost(_Tree):
    """A folder tree that stands for a host: files below `root`, tool outputs below ``<root>/.commands``.

    The answer to ``neuron-ls -j`` is the file ``.commands/neuron-ls_-j`` (see `command_slug`); beside it,
    ``neuron-ls_-j.rc`` may hold an exit status and ``neuron-ls_-j.stderr`` the other stream. A tool without a file
    is not installed.
    """

    def __init__(self, root: Path, *, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(root, environ or {})

    def run(self, argv: Sequence[str], timeout_s: float = 5.0) -> CommandResult:
        """Answer from the recorded output; `timeout_s` has no effect."""
        del timeout_s
        recorded = f"/{COMMANDS_FOLDER}/{command_slug(argv)}"
        stdout = self.read_text(recorded)
        returncode = self.read_text(f"{recorded}.rc")
        if stdout is None and returncode is None:
            return CommandResult(127, "", f"{argv[0]}: not found")
        return CommandResult(int(returncode or 0), stdout or "", self.read_text(f"{recorded}.stderr") or "")


def command_slug(argv: Sequence[str]) -> str:
    """File name of a recorded command: arguments joined by ``_``, every unsafe character replaced by ``_``."""
    return re.sub(r"[^A-Za-z0-9.,=+_-]", "_", "_".join(argv))


def _finish(process: subprocess.Popen[str], tool: str, timeout_s: float) -> CommandResult:
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        return CommandResult(124, "", f"{tool}: no answer within {timeout_s:g} s")
    return CommandResult(process.returncode, stdout, stderr)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Bounded, because a tool stuck in its driver does not die, and a descendant may still hold the pipes.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_REAP_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
