"""The ``kvduplex`` command: parses, delegates, and turns errors into messages and exit codes.

A command's code is imported when it is called and not before, so that ``kvduplex --help`` answers at once and a
missing extra stops only the commands that need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated

import typer

from kvduplex import __version__
from kvduplex.console import complain, say
from kvduplex.errors import KvduplexError, MissingExtraError

__all__ = ["app", "main"]

_DELEGATE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="kvduplex",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve LLMs with prefill and decode apart, and KV cache flowing both ways.",
)


def main() -> None:
    """Run the command line and exit; the console script's entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not so when the caller closed it
            stream.reconfigure(errors="replace")  # a terminal without ✓ is no reason to end a command
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


@app.command(context_settings=_DELEGATE, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Start engines and the router on this machine: serve cpu, serve neuron, serve gpu."""
    _load("kvduplex.serve", "app", extra="engine-cpu")(args=context.args, prog_name="kvduplex serve")


@app.command(context_settings=_DELEGATE, add_help_option=False)
def router(context: typer.Context) -> None:
    """Start the router alone, over engines that run elsewhere."""
    _load("kvduplex.router_command", "run_router", extra="router")(context.args)


@app.command(context_settings=_DELEGATE, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Say what this host has, what is wrong with it, and how to mend it."""
    _load("kvduplex.doctor", "app", extra="engine-cpu")(args=context.args, prog_name="kvduplex doctor")


@app.command(context_settings=_DELEGATE, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure clusters, transfers and policies."""
    _load("kvduplex_bench.app", "app", extra="bench")(args=context.args, prog_name="kvduplex bench")


@app.command(context_settings=_DELEGATE, add_help_option=False)
def sim(context: typer.Context) -> None:
    """Start simulated engines: vLLM's interfaces and timing without a model."""
    _load("kvduplex.sim_command", "app", extra="bench")(args=context.args, prog_name="kvduplex sim")


@app.command(context_settings=_DELEGATE, add_help_option=False)
def model(context: typer.Context) -> None:
    """Generate models with random weights."""
    _load("kvduplex.model_command", "app", extra="engine-cpu")(args=context.args, prog_name="kvduplex model")


@app.command(context_settings=_DELEGATE, add_help_option=False)
def launch(context: typer.Context) -> None:
    """Launch a cluster on EC2 from the prebuilt image: launch up, status, logs, terminate."""
    _load("kvduplex.ec2.command", "app", extra="aws")(args=context.args, prog_name="kvduplex launch")


@app.command(context_settings=_DELEGATE, add_help_option=False)
def node(context: typer.Context) -> None:
    """Run one machine of a cluster from its node file; what the units of the image call."""
    _load("kvduplex.node.command", "app", extra="router")(args=context.args, prog_name="kvduplex node")


@app.command()
def version() -> None:
    """Print the versions of kvduplex and of what it runs on."""
    _load("kvduplex.versions", "print_versions", extra="")()


def _load(module: str, name: str, *, extra: str) -> Callable[..., object]:
    """The object `name` of `module`.

    Raises:
        MissingExtraError: A package that only an extra installs is absent.
    """
    try:
        found: Callable[..., object] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not error.name or _is_ours(error.name):
            raise
        raise MissingExtraError(
            f"this command needs the package {error.name.partition('.')[0]}, which is not installed: "
            f"pip install 'kvduplex[{extra}]'"
        ) from error
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0].startswith("kvduplex")
