"""Engines that come, go, restart and die under load: what of it clients see.

A request counts as failed when a direct engine would have served it: every failure but those of requests that were at
an engine when it was killed, for they would have failed without a router too. Streams that had begun, and requests that
still waited, are counted each apart: the latter another engine could have answered.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

import uvloop

from kvduplex_bench.cluster import free_ports
from kvduplex_bench.errors import BenchError
from kvduplex_bench.processes import serving
from kvduplex_bench.routing.arms import Arm, Started
from kvduplex_bench.routing.client import ask
from kvduplex_bench.routing.play import ANSWER_WITHIN_S, Played
from kvduplex_bench.routing.ports import SIM_PORTS, run_of_ports
from kvduplex_bench.routing.processes import SimProcess
from kvduplex_bench.routing.run import Comparison
from kvduplex_bench.sim.core.timing import load_timing

__all__ = ["ChurnResult", "Deed", "churn", "judge"]

_NOTICED_S: Final = 4.0
_GRACE_S: Final = ANSWER_WITHIN_S  # as a rollout's grace period should: no answer that a client waits for is cut off
_MARGIN_S: Final = 10.0
_KILL_SHOWS_S: Final = 2.0
_LEAST: Final = 2


@dataclass(frozen=True, slots=True)
class Deed:
    """Something done to an engine.

    Attributes:
        at_s: When, from the start.
        what: ``add``, ``remove``, ``restart`` or ``kill``.
        engine: Its URL.
        took_s: Until the engine had ended; 0 of one that was added.
    """

    at_s: float
    what: str
    engine: str
    took_s: float = 0.0


@dataclass(slots=True)
class ChurnResult:
    """What came of it.

    Attributes:
        arm: The router.
        played: Every turn.
        deeds: What was done.
        broken_by_kill: Streams that broke within two seconds after an engine was killed.
        lost_by_kill: Requests that waited for an answer to begin at that time and got status 502.
        failed: Other failures, by kind.
        failures: The same, each with the seconds from the start at which it ended.
    """

    arm: Arm
    played: list[Played]
    deeds: list[Deed]
    broken_by_kill: int = 0
    lost_by_kill: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[float, str]] = field(default_factory=list)

    def faults(self) -> list[str]:
        """What must not happen and did."""
        failed = sum(self.failed.values())
        return [f"{failed} requests failed that a direct engine would have served"] if failed else []


def churn(
    comparison: Comparison,
    arm: Arm,
    *,
    every_s: float,
    progress: Callable[[str], None] = lambda _text: None,
) -> ChurnResult:
    """Play a trace while an engine is added, removed, restarted or killed every `every_s` seconds.

    Args:
        comparison: Trace, engines, load and duration; the fleet's replicas are what it starts with.
        arm: This router with some policy.
        every_s: Seconds between deeds.
        progress: Told what is going on.

    Raises:
        BenchError: Engines or the router did not start.
    """
    rate, writer = comparison.rate(), comparison.writer()
    with tempfile.TemporaryDirectory() as folder:
        fleet = _Fleet(comparison, Path(folder))
        try:
            fleet.begin()
            port, metrics_port = free_ports(2)
            timing = load_timing(comparison.timing)
            listed = Started([], comparison.tokenizer, timing.block_size, timing.model)
            command = [*arm.command(listed, port, metrics_port), "--engines-file", str(fleet.file)]
            with serving(command, port, environment=arm.environment(listed), log=Path(folder) / "router.log"):
                time.sleep(_NOTICED_S)
                playback = comparison.playback(
                    writer, partial(ask, port), rate,
                    lambda count: progress(f"churn: {count} answers, {len(fleet.deeds)} deeds"),
                )  # fmt: skip
                fleet.elapsed_s = playback.elapsed_s
                played = uvloop.run(playback.run_while(fleet.next_deed, every_s))
        finally:
            fleet.end()
    return judge(arm, played, fleet.deeds, comparison.time_scale)


class _Fleet:
    """Engines, one process each, and the file that lists them."""

    def __init__(self, comparison: Comparison, folder: Path) -> None:
        self._comparison = comparison
        self._chance = random.Random(1)
        self._round = itertools.cycle((self._add, self._restart, self._remove, self._kill))
        self._engines: list[SimProcess] = []
        self._started: list[SimProcess] = []
        self.elapsed_s: Callable[[], float] = lambda: 0.0
        self.file = folder / "engines.yaml"
        self.deeds: list[Deed] = []

    def begin(self) -> None:
        """Start the first engines."""
        self._engines = [self._new() for _ in range(self._comparison.fleet.replicas)]
        for engine in self._engines:
            engine.wait_until_ready()
        self._list()

    def end(self) -> None:
        """End all."""
        for engine in self._started:
            engine.stop(signal.SIGKILL, _MARGIN_S)

    async def next_deed(self) -> None:
        """The next of a round that touches every kind."""
        await next(self._round)()

    async def _add(self) -> None:
        engine = self._new()
        await asyncio.to_thread(engine.wait_until_ready)
        self._engines.append(engine)
        self.deeds.append(Deed(self.elapsed_s(), "add", engine.url))
        self._list()

    async def _remove(self) -> None:
        if len(self._engines) <= _LEAST:
            return
        engine = self._engines.pop(self._chance.randrange(len(self._engines)))
        self._list()
        await asyncio.sleep(_NOTICED_S)  # the router looks at the file once a second
        await self._end("remove", engine, signal.SIGTERM)

    async def _restart(self) -> None:
        """An operator's restart: the engine finishes what it answers, and comes back at the same address."""
        await self._again("restart", signal.SIGTERM)

    async def _kill(self) -> None:
        await self._again("kill", signal.SIGKILL)

    async def _again(self, what: str, how: signal.Signals) -> None:
        engine = self._chance.choice(self._engines)
        await self._end(what, engine, how)
        engine.start()
        await asyncio.to_thread(engine.wait_until_ready)

    async def _end(self, what: str, engine: SimProcess, how: signal.Signals) -> None:
        at_s = self.elapsed_s()
        await asyncio.to_thread(engine.stop, how, _GRACE_S + _MARGIN_S)
        self.deeds.append(Deed(at_s, what, engine.url, self.elapsed_s() - at_s))

    def _new(self) -> SimProcess:
        comparison = self._comparison
        arguments = ["--replicas", "1", *comparison.sim_arguments(), "--grace", str(_GRACE_S)]
        engine = SimProcess(arguments, run_of_ports(SIM_PORTS))
        self._started.append(engine)
        engine.start()
        return engine

    def _list(self) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps({"engines": [engine.entry for engine in self._engines]}))
        os.replace(fresh, self.file)  # noqa: PTH105 - in one step, so that no reader sees half a list


def judge(arm: Arm, played: list[Played], deeds: list[Deed], time_scale: float) -> ChurnResult:
    """Tell the failures apart.

    Raises:
        BenchError: Nothing was answered.
    """
    if not any(not each.error for each in played):
        raise BenchError(f"{arm.name} answered nothing under churn")
    result = ChurnResult(arm, played, deeds)
    kills = [deed.at_s for deed in deeds if deed.what == "kill"]
    for each in played:
        if not each.error:
            continue
        ended = each.ended * time_scale
        killed = any(0 <= ended - at <= _KILL_SHOWS_S for at in kills)
        if killed and each.status == HTTPStatus.BAD_GATEWAY:
            result.lost_by_kill += 1
        elif killed and each.ttft_s:
            result.broken_by_kill += 1
        else:
            result.failed[each.error] = result.failed.get(each.error, 0) + 1
            result.failures.append((ended, each.error))
    return result
