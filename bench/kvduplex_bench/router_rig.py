"""Routers under measurement and the fake engines behind them, all processes on loopback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from kvduplex_bench.cluster import free_ports
from kvduplex_bench.processes import serving

__all__ = ["Engines", "RouterProcess", "fake_engines", "own_router", "peer_router"]

_HOST: Final = "127.0.0.1"


class RouterProcess:
    """A router, with all processes that it has."""

    def __init__(self, process: psutil.Process, port: int) -> None:
        self._process = process
        self.port = port

    def cpu_s(self) -> float:
        """CPU seconds of all its threads and children so far, as exact as the kernel keeps them."""
        return sum(_thread_seconds(member.pid) for member in self._family())

    def memory(self) -> int:
        """Bytes that only it has in memory: resident, not shared with others."""
        return sum(int(member.memory_full_info().uss) for member in self._family())

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


def _thread_seconds(pid: int) -> float:
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(task.read_text().split()[0])
    return total / 1e9


class Engines:
    """One prefill and one decode engine.

    Attributes:
        prefill: Base URL.
        decode: Base URL; with leases, with the lease endpoint as the router's flag wants it.
        port: The decode engine's, to ask it directly.
    """

    def __init__(self, processes: Sequence[psutil.Process], prefill: int, decode: int, lease: int | None) -> None:
        self._processes = processes
        self.prefill = f"http://{_HOST}:{prefill}"
        self.decode = f"http://{_HOST}:{decode}" + (f"#lease={_HOST}:{lease}" if lease else "")
        self.port = decode

    def cpu_s(self) -> float:
        """CPU seconds of both so far."""
        return sum(_thread_seconds(process.pid) for process in self._processes)


@contextlib.contextmanager
def fake_engines(*, leases: bool = False) -> Iterator[Engines]:
    """Engines that answer at once, see `kvduplex_bench.router_engine`; the decode engine may keep leases.

    Raises:
        BenchError: One did not start.
    """
    prefill, decode, lease = free_ports(3)
    command = [sys.executable, "-m", "kvduplex_bench.router_engine"]
    with contextlib.ExitStack() as stack:
        ports = [[str(prefill)], [str(decode), *([str(lease)] if leases else [])]]
        processes = [stack.enter_context(serving([*command, *given], int(given[0]))) for given in ports]
        yield Engines(processes, prefill, decode, lease if leases else None)


@contextlib.contextmanager
def own_router(engines: Engines, *, workers: int = 1, flags: Sequence[str] = ()) -> Iterator[RouterProcess]:
    """Our router in front of them.

    Raises:
        BenchError: It did not start.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvduplex_router", "--listen", f"{_HOST}:{port}", "--workers", str(workers)]
    roles = ["--prefill", engines.prefill, "--decode", engines.decode]
    with serving([*command, *roles, *flags], port) as process:
        yield RouterProcess(process, port)


@contextlib.contextmanager
def peer_router(program: str, engines: Engines) -> Iterator[RouterProcess]:
    """PyPI's ``vllm-router`` in front of them, picking in turn.

    Raises:
        BenchError: It did not start.
    """
    port, metrics = free_ports(2)
    listen = ["--host", _HOST, "--port", str(port), "--prometheus-port", str(metrics)]
    roles = ["--vllm-pd-disaggregation", "--prefill", engines.prefill, "--decode", engines.decode]
    with serving([program, *listen, *roles, "--policy", "round_robin"], port) as process:
        yield RouterProcess(process, port)
