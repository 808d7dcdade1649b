"""The ``kvduplex`` command: parses, delegates, and turns errors into messages and exit codes.

Nothing heavy is imported before a command needs it, so that ``kvduplex --help`` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvduplex import __version__, model_command
from kvduplex.console import complain, say
from kvduplex.errors import KvduplexError

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvduplex",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve LLMs with prefill and decode apart, and KV cache flowing both ways.",
)
app.add_typer(model_command.app, name="model")


def main() -> None:
    """Run the command line and exit; the console script's entry point."""
    try:
        app()
    except KvduplexError as error:
        complain(str(error))
        sys.exit(error.exit_code)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"kvduplex {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve LLMs with prefill and decode apart, and KV cache flowing both ways."""
    del version
