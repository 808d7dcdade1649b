"""What the simulator is asked: each study with its question and the assumptions its rows rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from kvduplex_bench.routing.load import bearable_rate
from kvduplex_bench.sim.core.timing import Timing, load_timing
from kvduplex_bench.simulate.bounds import all_knowing, play_unhindered
from kvduplex_bench.simulate.clockwork import Agenda
from kvduplex_bench.simulate.fleet import Outcome, Pick, Player, play_replicas
from kvduplex_bench.simulate.pd import Leasing, PdFleet, PdSettings
from kvduplex_bench.simulate.peers import PEERS
from kvduplex_bench.simulate.published import PUBLISHED, replay
from kvduplex_bench.simulate.sums import sums
from kvduplex_bench.traces.generate import GENERATORS, agents
from kvduplex_bench.traces.model import Trace

__all__ = ["STUDIES", "Row", "Study"]

Row = dict[str, Any]

_GENERAL: Final = (
    "generated agent trace, seed 1; continuous batching with blocks for the whole answer set aside at admission, so "
    "nothing is preempted; no network or router time"
)
_WINDOW: Final = (60.0, 240.0)
_ENGINES: Final = 8
_POLICY_WINDOW: Final = (40.0, 80.0)
_SEEDS: Final = (1, 2)
_CONVERSATIONS: Final = 6000
_CLIENTS: Final = 16
_UNIQUE_RATE: Final = 75.0
"""More unique prompts a second than the engines can answer."""


@dataclass(frozen=True, slots=True)
class Study:
    """One question.

    Attributes:
        name: To ask for it.
        question: What is asked.
        assumes: What its rows rest on besides the profiles' own sources.
        rows: Answers, one at a time; takes a factor on the size.
    """

    name: str
    question: str
    assumes: str
    rows: Callable[[float], Iterator[Row]]


def _published(_size: float) -> Iterator[Row]:
    for point in PUBLISHED:
        ttft_s, prefill_s = replay(load_timing(point.profile), point.prefix, reuse=point.reuse)
        yield {
            "profile": point.profile,
            "prefix": point.prefix,
            "reuse": "on" if point.reuse else "off",
            "ttft_ms": round(ttft_s * 1000),
            "published": point.ttft_ms,
            "off_by": ttft_s * 1000 / point.ttft_ms - 1,
            "prefill_ms": round(prefill_s * 1000),
            "prefill_published": point.prefill_ms,
            "prefill_off_by": prefill_s * 1000 / point.prefill_ms - 1,
        }


def _pd(trace: Trace, rate: float, settings: PdSettings, window: tuple[float, float] = _WINDOW) -> Row:
    agenda = Agenda()
    fleet = PdFleet(settings, agenda)
    outcomes = Player(trace, rate, settings.timing.block_size, agenda, fleet.serve).run()
    counts = [engine.core.table.counts() for engine in fleet.decode]
    row = sums(outcomes, begin_s=window[0], end_s=window[1])
    row["leases_reclaimed"] = sum(count.ends["reclaimed"] for count in counts)
    row["renewals"] = sum(count.renewed for count in counts)
    return row


def _offered(rate: float, size: float) -> Trace:
    until = _WINDOW[1] * size
    return agents(int(rate * until * 1.3) + 20, 1).starting_by(until, rate)


def _fleets(size: float) -> Iterator[Row]:
    timing, rate = load_timing("qwen3-32b-h200"), 2.4
    trace, window = _offered(rate, size), (_WINDOW[0] * size, _WINDOW[1] * size)
    whole = play_replicas(trace, timing, replicas=_ENGINES, rate=rate, policy="session")
    yield {"fleet": f"{_ENGINES} replicas, session", **sums(whole, begin_s=window[0], end_s=window[1])}
    for prefill in range(1, _ENGINES):
        for plan in ("recompute", "pull"):
            settings = PdSettings(timing, prefill, _ENGINES - prefill, plan=plan)
            yield {"fleet": f"{prefill}P{_ENGINES - prefill}D {plan}", **_pd(trace, rate, settings, window)}


def _plans(size: float) -> Iterator[Row]:
    timing = load_timing("qwen3-32b-h200")
    window = (_WINDOW[0] * size, _WINDOW[1] * size)
    for rate in (0.8, 1.6, 2.4):
        trace = _offered(rate, size)
        for plan in ("recompute", "pull", "continue", "cheapest"):
            yield {"rate": rate, "plan": plan, **_pd(trace, rate, PdSettings(timing, 4, 4, plan=plan), window)}
        whole = play_replicas(trace, timing, replicas=_ENGINES, rate=rate, policy="session")
        yield {"rate": rate, "plan": "aggregate", **sums(whole, begin_s=window[0], end_s=window[1])}


def _pressure(size: float) -> Iterator[Row]:
    base, rate = load_timing("qwen3-32b-h200"), 1.6
    trace, window = _offered(rate, size), (_WINDOW[0] * size, _WINDOW[1] * size)
    for blocks in (3_500, 7_000, 14_000, 28_000):
        timing = msgspec.structs.replace(base, kv_blocks=blocks)
        for caching in (True, False):
            for plan in ("recompute", "pull"):
                settings = PdSettings(timing, 4, 4, plan=plan, prefill_caching=caching)
                row = {"kv_blocks": blocks, "prefill_cache": "on" if caching else "off", "plan": plan}
                yield {**row, **_pd(trace, rate, settings, window)}


def _ttl(size: float) -> Iterator[Row]:
    base, rate = load_timing("qwen3-32b-h200"), 1.6
    trace, window = _offered(rate, size), (_WINDOW[0] * size, _WINDOW[1] * size)
    arms = {
        "fixed 480 s": Leasing(480.0), "fixed 120 s": Leasing(120.0, longest_s=120.0),
        "fixed 30 s": Leasing(30.0, longest_s=30.0), "renewed 30 s": Leasing(30.0, renews=10.0),
    }  # fmt: skip
    for blocks in (7_000, 14_000):
        timing = msgspec.structs.replace(base, kv_blocks=blocks)
        for name, leasing in arms.items():
            settings = PdSettings(timing, 4, 4, leasing=leasing, prefill_caching=False)
            yield {"kv_blocks": blocks, "leases": name, **_pd(trace, rate, settings, window)}


def _threshold(size: float) -> Iterator[Row]:
    rate = 1.6
    trace, window = _offered(rate, size), (_WINDOW[0] * size, _WINDOW[1] * size)
    for profile in ("qwen3-32b-h200", "qwen3-32b-slow-network"):
        timing = _slow_network() if profile.endswith("network") else load_timing(profile)
        for threshold in (0, 64, 256, 1024, 4096, 1_000_000):
            row = _pd(trace, rate, PdSettings(timing, 4, 4, threshold=threshold), window)
            yield {"profile": profile, "threshold": threshold, **row}


def _policies(size: float) -> Iterator[Row]:
    # The router comes with an extra of its own, which the other studies do without.
    from kvduplex_bench.simulate.routed import OWN, play_routed  # noqa: PLC0415

    timing = load_timing("qwen3-32b-h200")
    begin_s, end_s = (each * size for each in _POLICY_WINDOW)
    peers: dict[str, Callable[[], Pick]] = {"(all-knowing)": all_knowing, **PEERS}
    arms: dict[str, Callable[..., list[Outcome]]] = {
        **{name: partial(play_replicas, policy=make) for name, make in peers.items()},
        **{f"kvduplex {policy}": partial(play_routed, policy=policy) for policy in OWN},
    }
    for name in ("agents", "rag", "mix"):
        traces = [GENERATORS[name](_CONVERSATIONS, seed) for seed in _SEEDS]
        full = bearable_rate(traces[0], timing, replicas=_ENGINES)
        for load in (0.5, 0.8, 0.95):
            rate = full * load
            offered = [trace.starting_by(end_s, rate) for trace in traces]
            found = [play_unhindered(each, timing, rate=rate) for each in offered]
            yield _policy_row(name, load, "(nothing in the way)", found, begin_s, end_s)
            for policy, play in arms.items():
                found = [play(each, timing, replicas=_ENGINES, rate=rate) for each in offered]
                yield _policy_row(name, load, policy, found, begin_s, end_s)
    unique = [GENERATORS["batch"](int(_UNIQUE_RATE * end_s) + 1, seed) for seed in _SEEDS]
    for policy, play in arms.items():
        found = [play(each, timing, replicas=_ENGINES, rate=1.0, clients=_CLIENTS * _ENGINES) for each in unique]
        yield _policy_row("batch", 1.0, policy, found, begin_s, end_s)


def _policy_row(
    trace: str, load: float, policy: str, found: Sequence[Sequence[Outcome]], begin_s: float, end_s: float
) -> Row:
    row = sums([each for outcomes in found for each in outcomes], begin_s=begin_s, end_s=end_s)
    row["tokens_per_s"] /= len(found)
    return {"trace": trace, "load": load, "policy": policy, **row}


def _slow_network() -> Timing:
    base = load_timing("qwen3-32b-h200")
    slow = msgspec.structs.replace(base.back, setup_s=0.15, per_token_s=2.1e-4, source="256 KiB a token at 10 Gb/s")
    return msgspec.structs.replace(base, back=slow)


def _machines(size: float) -> Iterator[Row]:
    window = (_WINDOW[0] * size, _WINDOW[1] * size)
    for rate in (0.8, 1.6, 2.4):
        trace = _offered(rate, size)
        for profile in ("qwen3-32b-h200", "qwen3-32b-trn2"):
            for plan in ("recompute", "pull"):
                row = _pd(trace, rate, PdSettings(load_timing(profile), 4, 4, plan=plan), window)
                yield {"rate": rate, "profile": profile, "plan": plan, **row}


def _scale(size: float) -> Iterator[Row]:
    base = load_timing("qwen3-32b-h200")
    coarse = msgspec.structs.replace(base, block_size=128, kv_blocks=base.kv_blocks // 8)
    conversations, pairs = int(100_000 * size), 32
    rate = 0.4 * pairs
    trace = agents(conversations, 1)
    end = conversations / rate
    for plan in ("recompute", "pull", "cheapest"):
        row = _pd(trace, rate, PdSettings(coarse, pairs, pairs, plan=plan), (end * 0.2, end * 0.95))
        yield {"fleet": f"{pairs}P{pairs}D", "conversations": conversations, "plan": plan, **row}


STUDIES: Final = {
    study.name: study
    for study in (
        Study(
            "published", "Do the profiles give the published 1P1D times?",
            "two engines, no router; TTFT and prefill are means of the turns after the first fifth", _published,
        ),
        Study(
            "fleets", "How are eight engines best divided between prefill and decode?",
            f"{_GENERAL}; 2.4 conversations a second; the prefill engine with the cheapest prompt is picked", _fleets,
        ),
        Study(
            "plans", "Which plan is best at which load, over 4P4D and eight replicas?",
            f"{_GENERAL}; cheapest: continue up to 256 new tokens, else pull", _plans,
        ),
        Study("pressure", "What does pulling gain when KV memory is short?", f"{_GENERAL}; 4P4D", _pressure),
        Study(
            "ttl", "What do renewable leases gain over fixed times?",
            f"{_GENERAL}; 4P4D, prefill caches off so that every reuse is a pull; renewals every 10 s while the "
            "conversation goes on, nine ends in ten show", _ttl,
        ),
        Study(
            "threshold", "How many tokens must a pull bring to be worth it?",
            f"{_GENERAL}; 4P4D; slow network: 10 Gb/s and 150 ms to begin", _threshold,
        ),
        Study(
            "policies", "Which policy is best over eight replicas, at which load?",
            "generated traces, seeds 1 and 2 together; the router's own code decides, without sockets; peers are "
            "approximations of their published algorithms, with exact knowledge of caches; those in brackets are no "
            "routers, see docs/simulation.md; turns of 40 s after 40 s",
            _policies,
        ),
        Study("machines", "Trn2 next to H200", f"{_GENERAL}; 4P4D; two rooflines, see the profiles", _machines),
        Study(
            "scale", "A hundred thousand conversations over 32P32D",
            f"{_GENERAL}; blocks of 128 tokens to save time, 0.4 conversations a second and pair", _scale,
        ),
    )
}  # fmt: skip
"""Studies by name."""
