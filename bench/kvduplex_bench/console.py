"""Where results are printed."""

from __future__ import annotations

import os
from typing import Final

from rich.console import Console

__all__ = ["result_console"]

_WIDTH: Final = 160


def result_console() -> Console:
    """Standard output; a file or pipe counts as wide, where rich would cut tables to 80 columns."""
    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS") else Console(width=_WIDTH)
