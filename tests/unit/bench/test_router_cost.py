"""The router's cost is measured over real processes."""

from __future__ import annotations

from kvduplex_bench.router_cost import CASES, Case, run


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
