"""Where kvduplex keeps files of its own, after the XDG base directory specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Folders"]


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
            runtime=runtime / "kvduplex" if runtime else Path("/tmp") / f"kvduplex-{uid}",  # noqa: S108 - checked by its user
        )


def _absolute(value: str | None) -> Path | None:
    return Path(value) if value and Path(value).is_absolute() else None
