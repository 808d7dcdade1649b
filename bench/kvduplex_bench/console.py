"""Where results are printed."""

from __future__ import annotations

import os
from typing import Final

from rich.console import Console
from rich.text import Text

__all__ = ["explain", "result_console"]

_WIDTH: Final = 160


def result_console() -> Console:
    """Standard output; a file or pipe counts as wide, where rich would cut tables to 80 columns."""
    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS") else Console(width=_WIDTH)


def explain(command: str, error: Exception) -> None:
    """Say on standard error why `command` ended; the error's words are neither markup nor pictures to rich."""
    said = Text.assemble((f"{command}:", "red"), f" {error}")
    Console(stderr=True).print(said, soft_wrap=True)
