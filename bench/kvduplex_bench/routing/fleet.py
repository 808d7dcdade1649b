"""Simulated engines and a router as processes, for the length of a measurement."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from kvduplex_bench.errors import BenchError
from kvduplex_bench.routing.stats import EngineSums

__all__ = ["engine_sums", "router_running", "sim_running", "wait_until_served"]

_START_S: Final = 60.0
_STOP_S: Final = 10.0


@contextlib.contextmanager
def sim_running(arguments: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """``kvduplex sim`` with `arguments`; gives what it says of its engines.

    Raises:
        BenchError: It was not ready in time.
    """
    command = [sys.executable, "-m", "kvduplex", "sim", "--json", "--grace", "0", *arguments]
    process = psutil.Popen(command, stdout=subprocess.PIPE)
    try:
        yield json.loads(_line(process))["engines"]
    finally:
        _end(process)


@contextlib.contextmanager
def router_running(command: Sequence[str], port: int, environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """A router that serves `port`; what it says goes to `log`.

    Raises:
        BenchError: It did not serve in time; the message ends with what it said.
    """
    with log.open("wb") as output:
        process = psutil.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        try:
            wait_until_served(process, port, log)
            yield
        finally:
            _end(process)


def wait_until_served(process: psutil.Popen, port: int, log: Path) -> None:
    """Wait for ``/health`` on `port`.

    Raises:
        BenchError: The process ended, or a minute went by.
    """
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(
            f"http://127.0.0.1:{port}/health", timeout=2
        ):  # fmt: skip
            return
        time.sleep(0.05)
    tail = " / ".join(log.read_text(errors="replace").strip().splitlines()[-5:])
    raise BenchError(f"{process.args[0]} did not serve port {port} within {_START_S:g} s: {tail}")


async def engine_sums(engines: Sequence[Mapping[str, Any]]) -> EngineSums:
    """Counters of the engines that compute prompts."""
    found = await asyncio.gather(*(asyncio.to_thread(_scrape, each["url"]) for each in engines))
    prompts = [values for each, values in zip(engines, found, strict=True) if each["role"] != "decode"]
    return EngineSums(
        sum(values.get("vllm:prompt_tokens_total", 0.0) for values in prompts),
        sum(values.get("vllm:prefix_cache_hits_total", 0.0) for values in prompts),
        sum(values.get("vllm:external_prefix_cache_hits_total", 0.0) for values in prompts),
        sum(values.get("kvduplex_sim_late_seconds_total", 0.0) for values in found),
        sum(values.get("kvduplex_sim_steps_total", 0.0) for values in found),
        max((values.get("kvduplex_sim_lag_seconds", 0.0) for values in found), default=0.0),
    )


def _scrape(url: str) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:  # noqa: S310 - our own engines
            text = reply.read().decode()
    except OSError:
        return {}
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def _line(process: psutil.Popen) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if selector.select(_START_S) and (line := process.stdout.readline()):
            return str(line.decode())
    raise BenchError(f"simulated engines were not ready within {_START_S:g} s; the message above says why")


def _end(process: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=_STOP_S)
        for member in alive:
            member.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
