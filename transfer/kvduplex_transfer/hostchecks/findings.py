"""Short constructors for findings, so that a check reads as what was seen, what should be, why and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable

from kvduplex_transfer.interface import Finding, Severity

__all__ = ["fail", "ok", "shorten", "warn"]

_LIST_LIMIT = 4


def ok(check: str, seen: str, expected: str) -> Finding:
    """A check that passed."""
    return Finding(check, Severity.OK, seen, expected)


def warn(check: str, seen: str, expected: str, *, why: str, fix: str) -> Finding:
    """Something works, but slower or less surely than it could."""
    return Finding(check, Severity.WARN, seen, expected, why, fix)


def fail(check: str, seen: str, expected: str, *, why: str, fix: str) -> Finding:
    """Engines must not be started before this is mended."""
    return Finding(check, Severity.FAIL, seen, expected, why, fix)


def shorten(items: Iterable[str]) -> str:
    """Join names, the first few spelled out and the rest counted: ``a, b, c, d and 12 more``."""
    names = list(items)
    shown = ", ".join(names[:_LIST_LIMIT])
    hidden = len(names) - _LIST_LIMIT
    return f"{shown} and {hidden} more" if hidden > 0 else shown
