"""A transfer from a peer that offers its memory, as a finding of the doctor."""

from __future__ import annotations

import socket

from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.interface import Finding

__all__ = ["transfer_finding"]

_DEADLINE_S = 2.0
_BLOCK_BYTES = 64 << 10
_BLOCKS = 256
_REPEATS = 5
_EXPECTED = "blocks read from the peer's memory, byte for byte"


def transfer_finding(backend: str, host: str, port: int | None = None) -> Finding:
    """Read blocks from the peer, when it listens for that.

    Args:
        backend: Entry point name of the backend, the same on both hosts.
        host: Address of the peer.
        port: Where `kvduplex bench transfer --listen` waits on it; None for the usual port.
    """
    from kvduplex_bench.errors import BenchError  # noqa: PLC0415 - numpy and NIXL, only for this finding
    from kvduplex_bench.transfer_peer import DEFAULT_PORT  # noqa: PLC0415

    there = port or DEFAULT_PORT
    try:
        socket.create_connection((host, there), timeout=_DEADLINE_S).close()
    except OSError as error:
        return _untested(backend, host, there, error.strerror or type(error).__name__)
    try:
        return ok("peer.transfer", _measured(backend, host, there), _EXPECTED)
    except BenchError as error:
        return fail(
            "peer.transfer",
            str(error),
            _EXPECTED,
            why="KV takes this very way between engines",
            fix=f"mend the findings of `kvduplex doctor --backend {backend}` on both hosts; "
            "the security group must allow all traffic within itself, for EFA in both directions",
        )


def _measured(backend: str, host: str, port: int) -> str:
    from kvduplex_bench.transfer_peer import fetch_offer  # noqa: PLC0415
    from kvduplex_bench.transfer_run import Case, measure  # noqa: PLC0415

    offer = fetch_offer(host, port, timeout_s=_DEADLINE_S)
    cases = [Case(_BLOCK_BYTES, count) for count in (1, max(1, min(_BLOCKS, offer.length // _BLOCK_BYTES)))]
    one, many = measure(backend, offer, cases, repeats=_REPEATS, report=lambda _: None)
    return (
        f"{many.rate / 1e9:.2f} GB/s in reads of {many.case.blocks} blocks of {_BLOCK_BYTES >> 10} KiB, "
        f"{one.case.total / one.rate * 1e6:.0f} µs for one block"
    )


def _untested(backend: str, host: str, port: int, reason: str) -> Finding:
    return warn(
        "peer.transfer",
        f"not tested: {host}:{port}: {reason}",
        _EXPECTED,
        why="open ports and equal versions do not show that the network moves KV between these two",
        fix=f"run `kvduplex bench transfer --backend {backend} --listen {host}:{port}` on the peer, then this again",
    )
