"""The router's cost is measured over real processes."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from kvduplex_bench import router_memory, router_workers
from kvduplex_bench.router_cost import CASES, Case, run
from kvduplex_bench.router_load import drive
from kvduplex_bench.router_memory import How
from kvduplex_bench.router_rig import fake_engines


def test_a_short_measurement_over_real_processes() -> None:
    cases = (Case("whole", 1_000), Case("stream", 60_000, 8))
    results = run(cases=cases, connections=(4,), requests=40, rounds=1)
    assert [result.case for result in results] == list(cases)
    for result in results:
        assert result.errors == 0
        assert result.cpu_us > 0
        assert result.first_byte_ms > 0
        assert result.ratio is None


def test_bodies_have_about_the_size_they_say() -> None:
    for case in CASES:
        assert 0.6 < len(case.body()) / case.body_bytes < 1.6


def test_bodies_may_be_one_each_and_all_are_sent() -> None:
    bodies = (json.dumps({"messages": [], "max_tokens": 1, "user": str(n)}).encode() for n in itertools.count())
    with fake_engines() as engines:
        load = asyncio.run(drive(engines.port, bodies, connections=3, requests=10))
    assert (load.requests, load.errors) == (10, 0)
    assert json.loads(next(bodies))["user"] == "10"


def test_workers_are_compared_over_real_processes() -> None:
    (result,) = router_workers.measure(2, cases=(Case("whole", 1_000), Case("paced", 1_000, 4, 20)), connections=4,
                                       requests=40, rounds=1)  # fmt: skip
    assert result.errors == 0
    assert result.ratio == pytest.approx(result.several / result.one)
    assert min(result.router_us, result.others_us) > 0


def test_the_ceiling_is_what_all_cores_serve_at_this_cost() -> None:
    scaling = router_workers.Scaling(CASES[0], 5_000, 7_000, 1.4, router_us=150, others_us=50, errors=0)
    assert scaling.ceiling(2) == pytest.approx(2.0)


@pytest.mark.parametrize("how", list(How))
def test_memory_is_measured_over_real_processes(how: How) -> None:
    steps: list[int] = []
    growth = router_memory.measure(how, conversations=300, idle_s=0, keep_s=60, on_step=steps.append)
    assert (growth.requests, growth.errors, steps) == (300, 0, [300])
    assert growth.peak >= 0
