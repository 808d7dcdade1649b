"""The one error tree of the command line.

`main` prints a `KvduplexError`'s message without a traceback and exits with its `exit_code`.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = ["EngineFailedError", "KvduplexError", "MissingExtraError", "ModelError", "PreflightError", "UsageError"]


class KvduplexError(Exception):
    """Base of every error that the command line explains to its user."""

    exit_code: ClassVar[int] = 1


class UsageError(KvduplexError):
    """An option's value is wrong, or options do not go together."""

    exit_code = 2


class PreflightError(KvduplexError):
    """Something this machine lacks; nothing was started."""

    exit_code = 2


class ModelError(PreflightError):
    """The model cannot be made or is not one; nothing was started."""


class EngineFailedError(KvduplexError):
    """A process died or did not become ready; everything else was stopped."""


class MissingExtraError(KvduplexError):
    """A command's package belongs to an extra that is not installed."""

    exit_code = 2
