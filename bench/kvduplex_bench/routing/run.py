"""One comparison: every arm over fresh engines with the same trace, one after the other or side by side."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from kvduplex_bench.cluster import free_ports
from kvduplex_bench.errors import BenchError
from kvduplex_bench.processes import serving
from kvduplex_bench.routing.arms import Arm, Started
from kvduplex_bench.routing.beside import run_beside
from kvduplex_bench.routing.client import Ask, ask
from kvduplex_bench.routing.fleet import engine_sums, sim_running
from kvduplex_bench.routing.load import bearable_rate
from kvduplex_bench.routing.play import Playback, Played
from kvduplex_bench.routing.ports import SIM_PORTS, run_of_ports
from kvduplex_bench.routing.stats import EngineSums, Summary, summarise
from kvduplex_bench.sim.core.timing import load_timing
from kvduplex_bench.sim.http.tokens import Tokens
from kvduplex_bench.traces.model import Trace
from kvduplex_bench.traces.text import Writer

__all__ = ["Comparison", "Fleet", "Result", "compare"]

_CLIENTS_PER_ENGINE: Final = 16


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of a comparison.

    Attributes:
        name: For tables.
        replicas: Engines that do everything.
        prefill: Prefill engines.
        decode: Decode engines.
    """

    name: str
    replicas: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def size(self) -> int:
        """Engines altogether."""
        return self.replicas + self.prefill + self.decode

    def arguments(self) -> list[str]:
        """For ``kvduplex sim``."""
        sizes = {"--replicas": self.replicas, "--prefill": self.prefill, "--decode": self.decode}
        return [part for flag, count in sizes.items() for part in (flag, str(count))]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared.

    Attributes:
        trace: The workload.
        fleet: The engines.
        timing: Name or file of their profile.
        tokenizer: Folder of the served model's tokenizer.
        load: Share of the bearable rate; of no account for a closed trace.
        seconds: How long conversations begin, in seconds of the profile.
        warm_up: Of those, not counted.
        time_scale: Seconds of the clock for one second of the profile.
        stream_interval: Tokens in one part of a stream.
    """

    trace: Trace
    fleet: Fleet
    timing: str
    tokenizer: Path
    load: float = 0.8
    seconds: float = 100.0
    warm_up: float = 30.0
    time_scale: float = 1.0
    stream_interval: int = 8

    def rate(self) -> float:
        """Conversations a second that make up the load; 0 for a closed trace. Takes a simulation of some seconds."""
        if self.trace.closed:
            return 0.0
        sizes, timing = self.fleet, load_timing(self.timing)
        full = bearable_rate(self.trace, timing, replicas=sizes.replicas, prefill=sizes.prefill, decode=sizes.decode)
        return full * self.load

    def sim_arguments(self) -> list[str]:
        """For ``kvduplex sim``: profile, tokenizer and times of each engine."""
        return [
            "--model-timing", self.timing, "--tokenizer", str(self.tokenizer),
            "--time-scale", str(self.time_scale), "--stream-interval", str(self.stream_interval),
        ]  # fmt: skip

    def fleet_arguments(self) -> list[str]:
        """The same for the whole fleet in one process, at ports that are free now."""
        port = run_of_ports(self.fleet.size * SIM_PORTS)
        return [*self.fleet.arguments(), "--port", str(port), *self.sim_arguments()]

    def writer(self) -> Writer:
        """Writes the trace's content out in words of the tokenizer."""
        return Writer([text for _, text in Tokens(self.tokenizer).words])

    def playback(self, writer: Writer, ask: Ask, rate: float, progress: Callable[[int], None]) -> Playback:
        """The trace at `rate`, ready to be played once."""
        trace = self.trace
        return Playback(
            trace if trace.closed else trace.starting_by(self.seconds, rate), writer, ask,
            load_timing(self.timing).model, rate or 1.0, self.time_scale, self.fleet.size * _CLIENTS_PER_ENGINE,
            float("inf") if trace.closed else self.seconds, progress,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One arm.

    Attributes:
        arm: Which.
        comparison: Of what.
        rate: Conversations a second; 0 for a closed trace.
        summary: Its sums.
        played: Every turn.
        errors: Kinds of failure and how often.
    """

    arm: Arm
    comparison: Comparison
    rate: float
    summary: Summary
    played: list[Played] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


def compare(
    comparison: Comparison,
    arms: Sequence[Arm],
    *,
    at_once: int = 1,
    progress: Callable[[str], None] = lambda _text: None,
    on_result: Callable[[Result], None] = lambda _result: None,
) -> list[Result]:
    """Run every arm.

    Args:
        comparison: What is compared.
        arms: The routers, in this order.
        at_once: Arms that run at the same time, each with engines of its own.
        progress: Told what is going on.
        on_result: Told each result as it is there, so that an interruption loses little.

    Returns:
        Results in the order of the arms.

    Raises:
        BenchError: Engines or a router did not start.
    """
    title = f"{comparison.trace.name}, {comparison.fleet.name}"
    if not comparison.trace.closed:
        progress(f"{title}: finding the rate of {comparison.load:.0%} load")
    rate = comparison.rate()
    found: dict[int, Result] = {}

    def note(place: int, result: Result) -> None:
        found[place] = result
        on_result(result)
        if at_once > 1:
            progress(f"{title}: {len(found)} of {len(arms)} arms done")

    if at_once > 1:
        progress(f"{title}: {min(at_once, len(arms))} arms at once")
        run_beside([partial(_one, comparison, arm, rate) for arm in arms], at_once, note)
    else:
        for place, arm in enumerate(arms):
            note(place, _one(comparison, arm, rate, progress))
    return [found[place] for place in range(len(arms))]


def _one(comparison: Comparison, arm: Arm, rate: float, progress: Callable[[str], None] = lambda _text: None) -> Result:
    title = f"{comparison.trace.name}, {comparison.fleet.name}, {arm.name}"
    progress(f"{title}: starting")
    timing, writer = load_timing(comparison.timing), comparison.writer()
    port, metrics_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder, sim_running(comparison.fleet_arguments()) as engines:
        started = Started(engines, comparison.tokenizer, timing.block_size, timing.model)
        command = arm.command(started, port, metrics_port)
        with serving(command, port, environment=arm.environment(started), log=Path(folder) / "router.log"):
            playback = comparison.playback(
                writer, partial(ask, port), rate, lambda count: progress(f"{title}: {count} answers")
            )
            played, sums = uvloop.run(_measured(playback, engines, comparison))
    return _result(comparison, arm, rate, played, sums)


async def _measured(
    playback: Playback, engines: list[dict[str, object]], comparison: Comparison
) -> tuple[list[Played], EngineSums]:
    """Play, with the engines' counters taken over the counted window alone."""
    if comparison.trace.closed:
        return await playback.run(), await engine_sums(engines)
    playing = asyncio.create_task(playback.run())
    await asyncio.sleep(comparison.warm_up * comparison.time_scale)
    before = await engine_sums(engines)
    await asyncio.sleep((comparison.seconds - comparison.warm_up) * comparison.time_scale)
    after = await engine_sums(engines)
    return await playing, after.since(before)


def _result(comparison: Comparison, arm: Arm, rate: float, played: list[Played], sums: EngineSums) -> Result:
    begin_s, end_s = (0.0, _last_end(played)) if comparison.trace.closed else (comparison.warm_up, comparison.seconds)
    errors: dict[str, int] = {}
    for each in played:
        if each.error:
            errors[each.error] = errors.get(each.error, 0) + 1
    if len(played) == sum(errors.values()):
        raise BenchError(f"{arm.name} answered nothing: {errors or 'no request was sent'}")
    summary = summarise(played, sums, begin_s=begin_s, end_s=end_s)
    return Result(arm, comparison, rate, summary, played, errors)


def _last_end(played: list[Played]) -> float:
    return max((each.ended for each in played), default=0.0) + 1e-9
