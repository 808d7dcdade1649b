"""``kvduplex router``: the router in this process, with the router's own flags and error messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvduplex_router.__main__ import main

__all__ = ["run_router"]


def run_router(argv: Sequence[str]) -> None:
    """Serve until told to stop, then exit.

    Args:
        argv: Flags of the router; see ``kvduplex router --help``.
    """
    sys.exit(main(argv))
