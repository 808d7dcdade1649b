"""``kvduplex bench transfer``: latency and bandwidth of KV reads between two hosts, or over loopback."""

from __future__ import annotations

import json as jsonlib
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import typer
from rich.table import Table

from kvduplex_bench.console import explain, result_console
from kvduplex_bench.errors import BenchError
from kvduplex_bench.transfer_peer import DEFAULT_PORT, Offer, backend_named, fetch_offer, offered, serve
from kvduplex_bench.transfer_run import Case, Measured, loopback_peer, measure, memory_copy_rate
from kvduplex_transfer.errors import TransferError

__all__ = ["transfer"]

_SEED = 7
_GB = 1e9
_COUNTS = "1,32,128,512,1024,4096"


def transfer(
    backend: Annotated[str, typer.Option(help="host, neuron or gpu.")] = "host",
    peer: Annotated[str, typer.Option(help="HOST[:PORT] that listens; without it, a process on this host.")] = "",
    listen: Annotated[str, typer.Option(help="ADDRESS[:PORT] to be read from, until interrupted.")] = "",
    block_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a block: one layer's K or V of 32 tokens.")] = 65536,
    blocks: Annotated[str, typer.Option(help="Numbers of blocks a read, with commas.")] = _COUNTS,
    repeats: Annotated[int, typer.Option(min=1, help="Reads of each arm a size.")] = 21,
    size: Annotated[int, typer.Option("--bytes", min=1, help="Bytes offered by --listen.")] = 256 << 20,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line a size.")] = False,
) -> None:
    """Read KV-sized blocks from a peer, through the transfer interface and directly through NIXL, side by side."""
    try:
        backend_named(backend)
        if listen:
            _refuse_both_sides(peer)
            _listen(backend, listen, size)
            return
        cases = [Case(block_bytes, count) for count in _counts(blocks)]
        with _offer(backend, peer, max(case.total for case in cases)) as offer:
            found = measure(backend, offer, cases, repeats=repeats, report=_print_json if json else lambda _: None)
        if not json:
            _print_table(found, copy_rate=memory_copy_rate(), loopback=not peer)
    except (BenchError, TransferError) as error:
        explain("bench transfer", error)
        raise typer.Exit(1) from error


def _refuse_both_sides(peer: str) -> None:
    if peer:
        raise BenchError("--listen and --peer do not go together: one side offers memory, the other reads it")


def _listen(backend: str, where: str, size: int) -> None:
    host, port = _address(where)
    there = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with _listener(host, port) as listener, offered(backend_named(backend), length=size, seed=_SEED) as offer:
        result_console().print(
            f"Offering {size} pseudo-random bytes of {backend} memory at {there} to whoever connects. "
            f"On the other host: kvduplex bench transfer --backend {backend} --peer {there}. Ctrl-C ends it.",
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )
        try:
            serve(listener, offer)
        except KeyboardInterrupt:
            return


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        raise BenchError(
            f"--listen {host}:{port}: {getattr(error, 'strerror', error)}; give an address of this host, a free port"
        ) from error


def _offer(backend: str, peer: str, length: int) -> AbstractContextManager[Offer]:
    if not peer:
        return loopback_peer(backend, length=length, seed=_SEED)
    host, port = _address(peer)
    return nullcontext(fetch_offer(host, port, timeout_s=5.0))


def _address(text: str) -> tuple[str, int]:
    """``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``."""
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]") or (":" in host and not host.startswith("[")):
        return text.strip("[]"), DEFAULT_PORT
    if not port.isdigit() or not 0 < int(port) < 65536:  # noqa: PLR2004 - TCP's range
        raise BenchError(f"{text}: {port!r} is no port; write HOST:PORT, with a port from 1 to 65535")
    if not host:
        raise BenchError(f"{text}: there is no address before the port; write HOST:PORT")
    return host.strip("[]"), int(port)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise BenchError(f"--blocks {text}: write numbers with commas, e.g. {_COUNTS}") from error
    if min(counts) < 1:
        raise BenchError(f"--blocks {text}: each must be at least 1")
    return counts


def _print_json(one: Measured) -> None:
    line = {
        "blocks": one.case.blocks,
        "block_bytes": one.case.block_bytes,
        "interface_s": one.interface,
        "direct_s": one.direct,
        "share": one.share,
    }
    typer.echo(jsonlib.dumps(line))


def _print_table(found: Sequence[Measured], *, copy_rate: float, loopback: bool) -> None:
    table = Table("blocks", "MiB", "median", "GB/s", "NIXL alone", "share", "added", title="Reads of scattered blocks")
    for one in found:
        table.add_row(
            str(one.case.blocks),
            f"{one.case.total / (1 << 20):.2f}",
            f"{one.case.total / one.rate * 1e6:.0f} µs",
            f"{one.rate / _GB:.2f}",
            f"{one.direct_rate / _GB:.2f}",
            f"{one.share:.0%}",
            f"{one.overhead_s * 1e6:+.0f} µs",
        )
    console = result_console()
    console.print(table)
    limit = "the limit over loopback" if loopback else "for comparison"
    console.print(f"One core copies {copy_rate / _GB:.1f} GB/s within this host's memory ({limit}).")
