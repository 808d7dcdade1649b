"""Where the command line's words go: results to standard output, everything else to standard error."""

from __future__ import annotations

import sys

__all__ = ["complain", "note", "say"]


def say(text: str) -> None:
    """Print a result."""
    print(text, flush=True)  # noqa: T201 - this is the one place that prints


def note(text: str) -> None:
    """Tell what is going on."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def complain(text: str) -> None:
    """Explain an error."""
    print(f"kvduplex: {text}", file=sys.stderr, flush=True)  # noqa: T201
