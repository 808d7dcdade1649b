"""Where kvduplex keeps files of its own, after the XDG base directory specification."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvduplex.errors import PreflightError

__all__ = ["Folders", "private_folder"]


@dataclass(frozen=True, slots=True)
class Folders:
    """The user's folders; none needs to exist.

    Attributes:
        cache: What can be made again: generated models.
        state: What outlives a run: logs.
        runtime: What must not: lock files and engines' temporary files.
    """

    cache: Path
    state: Path
    runtime: Path

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], *, home: Path, uid: int) -> Folders:
        """Read the XDG variables; an unset, empty or relative one has its default, as the specification says.

        Without ``XDG_RUNTIME_DIR`` the runtime folder is one of the user's own below ``/tmp``: the path must stay
        short, since Unix sockets below it may have no more than 107 bytes.
        """
        cache = _absolute(environ.get("XDG_CACHE_HOME")) or home / ".cache"
        state = _absolute(environ.get("XDG_STATE_HOME")) or home / ".local" / "state"
        runtime = _absolute(environ.get("XDG_RUNTIME_DIR"))
        return cls(
            cache=cache / "kvduplex",
            state=state / "kvduplex",
            runtime=runtime / "kvduplex" if runtime else Path("/tmp") / f"kvduplex-{uid}",  # noqa: S108 - checked by `private_folder`
        )


def _absolute(value: str | None) -> Path | None:
    return Path(value) if value and Path(value).is_absolute() else None


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can write to, and return it.

    Raises:
        PreflightError: It belongs to somebody else, who could plant files in it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        seen = path.lstat()
    except OSError as error:
        raise PreflightError(
            f"cannot create the folder {path}: {error.strerror}. Set XDG_RUNTIME_DIR to another."
        ) from error
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PreflightError(
            f"{path} must be a folder that only you can write to; it is {stat.filemode(seen.st_mode)} of user "
            f"{seen.st_uid}. Remove it, or set XDG_RUNTIME_DIR to another folder."
        )
    return path
