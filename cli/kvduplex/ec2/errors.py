"""Errors of launching, each explained by the command line."""

from __future__ import annotations

from kvduplex.errors import KvduplexError, PreflightError, UsageError

__all__ = [
    "CapacityError",
    "ClusterConflictError",
    "DeclinedError",
    "LaunchPreflightError",
    "LogsError",
    "RequestError",
]


class RequestError(UsageError):
    """What was asked for cannot be launched; nothing was asked of AWS."""


class LaunchPreflightError(PreflightError):
    """AWS would refuse, or the cluster would not work; nothing was started."""


class ClusterConflictError(PreflightError):
    """A cluster of that name runs with other settings; nothing was started."""


class DeclinedError(KvduplexError):
    """The cost was not confirmed; nothing was started."""


class CapacityError(KvduplexError):
    """AWS could not give every instance; the message says what runs."""


class LogsError(KvduplexError):
    """A machine's logs cannot be read."""
