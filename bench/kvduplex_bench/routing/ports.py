"""Free ports in a row on loopback."""

from __future__ import annotations

import random
import socket
from typing import Final

from kvduplex_bench.errors import BenchError

__all__ = ["SIM_PORTS", "run_of_ports"]

SIM_PORTS: Final = 4
"""Ports of a simulated engine."""

_TRIES: Final = 200
_LOWEST, _HIGHEST = 10_000, 32_000


def run_of_ports(count: int) -> int:
    """A port from which on `count` ports are free now, below those that systems give to outgoing connections.

    Raises:
        BenchError: None was found.
    """
    for _ in range(_TRIES):
        first = random.SystemRandom().randrange(_LOWEST, _HIGHEST - count)
        if all(map(_free, range(first, first + count))):
            return first
    raise BenchError(f"no {count} free ports in a row on 127.0.0.1")


def _free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
