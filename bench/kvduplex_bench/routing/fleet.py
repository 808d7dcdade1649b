"""Simulated engines as a process, for the length of a measurement, and what they counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from kvduplex_bench.errors import BenchError, UnreachableError
from kvduplex_bench.processes import START_S, end
from kvduplex_bench.routing.stats import EngineSums
from kvduplex_bench.scrape import Reading, scrape

__all__ = ["Handles", "engine_sums", "handles_used", "sim_running"]

_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Handles:
    """What engines saw of the handles that routers took: leases named for a prefill engine to claim.

    Attributes:
        used: Leases named.
        twice: Of those, named more than once, to whichever engines.
        refused: Claims that ended in recomputation, by reason.
    """

    used: int = 0
    twice: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)


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
        end(process)


async def engine_sums(engines: Sequence[Mapping[str, Any]]) -> EngineSums:
    """Counters of the engines that compute prompts."""
    found = await asyncio.gather(*(asyncio.to_thread(_reading, each["url"]) for each in engines))
    prompts = [reading for each, reading in zip(engines, found, strict=True) if each["role"] != "decode"]
    return EngineSums(
        sum(reading.total("vllm:prompt_tokens_total") for reading in prompts),
        sum(reading.total("vllm:prefix_cache_hits_total") for reading in prompts),
        sum(reading.total("vllm:external_prefix_cache_hits_total") for reading in prompts),
        sum(reading.total("kvduplex_sim_late_seconds_total") for reading in found),
        sum(reading.total("kvduplex_sim_steps_total") for reading in found),
        max((reading.total("kvduplex_sim_lag_seconds") for reading in found), default=0.0),
    )


def handles_used(engines: Sequence[Mapping[str, Any]]) -> Handles:
    """What the prefill engines saw since their start.

    Raises:
        BenchError: One does not answer, or has forgotten some.
    """
    named: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for url in (each["url"] for each in engines if each["role"] == "prefill"):
        try:
            with urllib.request.urlopen(f"{url}/sim/offers", timeout=_WITHIN_S) as reply:  # noqa: S310 - our engine
                seen = json.load(reply)
        except OSError as error:
            raise BenchError(
                f"the simulated engine at {url} did not say which leases it was offered: {error}"
            ) from error
        if seen["offered"] != len(seen["leases"]):
            raise BenchError(f"{url} was offered {seen['offered']} leases, more than it remembers; play for less long")
        named.update(seen["leases"])
        for (name, labels), value in scrape(url).samples.items():
            if name == "kvduplex_lease_refused_total":
                refused[dict(labels)["reason"]] += int(value)
    return Handles(len(named), sum(count > 1 for count in named.values()), dict(refused))


def _reading(url: str) -> Reading:
    """An engine's metrics; none of one that is gone."""
    try:
        return scrape(url)
    except UnreachableError:
        return Reading({})


def _line(process: psutil.Popen) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if selector.select(START_S) and (line := process.stdout.readline()):
            return str(line.decode())
    raise BenchError(f"simulated engines were not ready within {START_S:g} s; the message above says why")
