"""``kvduplex model``: the generated models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvduplex.console import note, say
from kvduplex.errors import UsageError
from kvduplex.folders import Folders

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Generate models with random weights.")


@app.callback()
def _group() -> None:
    """Generate models with random weights."""


@app.command()
def make(
    size: Annotated[str, typer.Option(help="tiny (2 MB), 20m (90 MB) or 85m (340 MB).")] = "tiny",
    cache: Annotated[Path | None, typer.Option(help="Cache folder; default: $XDG_CACHE_HOME/kvduplex.")] = None,
) -> None:
    """Generate a random Qwen3 in the cache folder, unless it is there already, and print its folder."""
    from kvduplex.tinymodel import SIZES, ensure_model  # noqa: PLC0415 - numpy would slow down every other command

    if size not in SIZES:
        raise UsageError(f"--size {size}: unknown; choose one of {', '.join(SIZES)}.")
    root = cache or Folders.from_environ(os.environ, home=Path.home(), uid=os.getuid()).cache
    say(str(ensure_model(SIZES[size], root, report=note)))
