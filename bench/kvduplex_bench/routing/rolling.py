"""Two routers that share conversations, restarted in turns under load: what of it clients and engines see."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import uvloop

from kvduplex_bench.cluster import free_ports
from kvduplex_bench.errors import BenchError
from kvduplex_bench.routing.arms import Arm, Started
from kvduplex_bench.routing.balancer import Balancer, Moved
from kvduplex_bench.routing.fleet import Handles, handles_used, sim_running
from kvduplex_bench.routing.play import ANSWER_WITHIN_S, Playback, Played
from kvduplex_bench.routing.processes import RouterProcess, state_server
from kvduplex_bench.routing.run import Comparison
from kvduplex_bench.sim.core.timing import load_timing

__all__ = ["Restart", "RollingResult", "judge", "rolling"]

_ROUTERS: Final = 2
_MARGIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Restart:
    """One router's restart, in seconds of the clock.

    Attributes:
        at_s: When it was told to stop, from the start of the playback.
        router: Its port.
        drain_s: From then to its end.
        away_s: From then until its health check passed again.
        status: Its exit status, or the negative number of the signal that ended it.
    """

    at_s: float
    router: int
    drain_s: float
    away_s: float
    status: int


@dataclass(slots=True)
class RollingResult:
    """What came of it.

    Attributes:
        arm: The routers.
        played: Every turn.
        restarts: What was done.
        moved: Requests that another router got.
        handles: What engines saw of handles.
        failed: Failures by kind.
        failures: The same, each with the seconds from the start at which it ended.
        plans: Answered turns by plan.
        later: Answered turns that continue a conversation.
        pulled: Of those, turns with the plan ``pull``.
    """

    arm: Arm
    played: list[Played]
    restarts: list[Restart]
    moved: Moved
    handles: Handles
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[float, str]] = field(default_factory=list)
    plans: Counter[str] = field(default_factory=Counter)
    later: int = 0
    pulled: int = 0

    @property
    def answered(self) -> int:
        """Turns that were answered."""
        return self.plans.total()

    def faults(self) -> list[str]:
        """What must not happen and did."""
        hard = sum(each.status != 0 for each in self.restarts)
        counts = {
            "requests failed": self.failed.total(),
            "handles were used more than once": self.handles.twice,
            "routers did not end by themselves with status 0": hard,
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


def rolling(
    comparison: Comparison,
    arm: Arm,
    *,
    every_s: float,
    progress: Callable[[str], None] = lambda _text: None,
) -> RollingResult:
    """Play a trace over two routers that share a state server, and restart one of them every `every_s` seconds.

    Args:
        comparison: Trace, engines, load and duration; the fleet has prefill and decode engines.
        arm: This router with some policy.
        every_s: Seconds between restarts.
        progress: Told what is going on.

    Raises:
        BenchError: The fleet or the times do not fit, or a program did not start.
    """
    _check(comparison, every_s)
    with contextlib.ExitStack() as started:
        folder = Path(started.enter_context(tempfile.TemporaryDirectory()))
        state = started.enter_context(state_server(folder))
        progress("rolling: finding the rate")
        rate, writer = comparison.rate(), comparison.writer()
        engines = started.enter_context(sim_running(comparison.fleet_arguments()))
        routers = _Routers(comparison, _sharing(arm, state, folder), engines, free_ports(_ROUTERS), folder)
        started.callback(routers.end)
        routers.begin()
        playback = comparison.playback(
            writer, routers.balancer.ask, rate,
            lambda count: progress(f"rolling: {count} answers, {len(routers.restarts)} restarts"),
        )  # fmt: skip
        played = uvloop.run(_played(playback, routers, every_s))
        handles = handles_used(engines)
    return judge(arm, played, routers.restarts, routers.balancer.moved, handles, comparison.time_scale)


def _check(comparison: Comparison, every_s: float) -> None:
    fleet = comparison.fleet
    if not (fleet.prefill and fleet.decode):
        raise BenchError(f"--rolling over {fleet.name}: handles are used between prefill and decode engines; take 4P4D")
    if comparison.trace.closed:
        raise BenchError(f"--rolling with the trace {comparison.trace.name}: its turns have no arrival times")
    least = (_ROUTERS + 1) * every_s / comparison.time_scale
    if comparison.seconds < least:
        raise BenchError(
            f"--seconds {comparison.seconds:g} with --every {every_s:g}: not every router would be restarted; take "
            f"--seconds {least:g} or more"
        )


def _sharing(arm: Arm, state: str, folder: Path) -> Arm:
    """`arm` with the shared state, and with time to end any answer that a client would wait for."""
    config = folder / "router.yaml"
    config.write_text(json.dumps({"timeouts": {"shutdown_s": ANSWER_WITHIN_S}}))
    return replace(arm, options=(*arm.options, "--config", str(config), "--state", state))


async def _played(playback: Playback, routers: _Routers, every_s: float) -> list[Played]:
    routers.elapsed_s = playback.elapsed_s
    try:
        return await playback.run_while(routers.restart_next, every_s)
    finally:
        routers.balancer.close()


class _Routers:
    """The routers, a process each, behind a load balancer."""

    def __init__(
        self, comparison: Comparison, arm: Arm, engines: list[dict[str, object]], ports: Sequence[int], folder: Path
    ) -> None:
        timing = load_timing(comparison.timing)
        started = Started(engines, comparison.tokenizer, timing.block_size, timing.model)
        self._routers = [
            RouterProcess(
                arm.command(started, port, 0), port, environment=arm.environment(started),
                log=folder / f"router-{port}.log",
            )
            for port in ports
        ]  # fmt: skip
        self._turns = itertools.cycle(self._routers)
        self.balancer = Balancer(ports)
        self.restarts: list[Restart] = []
        self.elapsed_s: Callable[[], float] = lambda: 0.0

    def begin(self) -> None:
        """Start them."""
        for router in self._routers:
            router.start()
        for router in self._routers:
            router.wait_until_ready()

    def end(self) -> None:
        """End all."""
        for router in self._routers:
            router.stop(signal.SIGKILL, _MARGIN_S)

    async def restart_next(self) -> None:
        """An operator's restart of one of them: it ends what it answers, and comes back at the same port."""
        router, at_s, began = next(self._turns), self.elapsed_s(), time.monotonic()
        status = await asyncio.to_thread(router.stop, signal.SIGTERM, ANSWER_WITHIN_S + _MARGIN_S)
        drain_s = time.monotonic() - began
        router.start()
        await asyncio.to_thread(router.wait_until_ready)
        self.balancer.serve(router.port)
        self.restarts.append(Restart(at_s, router.port, drain_s, time.monotonic() - began, status))


def judge(
    arm: Arm, played: list[Played], restarts: list[Restart], moved: Moved, handles: Handles, time_scale: float
) -> RollingResult:
    """Count what failed and what was planned.

    Raises:
        BenchError: Nothing was answered, no handle was used or no router restarted, so that nothing is shown.
    """
    result = RollingResult(arm, played, restarts, moved, handles)
    for each in played:
        if each.error:
            result.failed[each.error] += 1
            result.failures.append((each.ended * time_scale, each.error))
        else:
            result.plans[each.plan or "none"] += 1
            result.later += each.number > 0
            result.pulled += each.number > 0 and each.plan == "pull"
    for count, what in ((result.answered, "answered nothing"), (handles.used, "used no handle")):
        if not count:
            raise BenchError(f"{arm.name} {what} during restarts: {dict(result.failed) or 'too few turns'}")
    if len({each.router for each in restarts}) < _ROUTERS:
        raise BenchError(f"{len(restarts)} restarts: not every router was restarted; play for longer")
    return result
