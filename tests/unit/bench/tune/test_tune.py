"""Costs fitted through points of known curves, and what is advised from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvduplex_bench.app import app
from kvduplex_bench.errors import BenchError
from kvduplex_bench.scrape import parse
from kvduplex_bench.tune.advice import Advice, Habits, advise
from kvduplex_bench.tune.costs import Compute, Read, Sample, fit_compute, fit_read
from kvduplex_bench.tune.curve import write_curve
from kvduplex_bench.tune.probe import Capacity, capacity

NOBODY = "http://127.0.0.1:1"
LENGTHS = (128, 512, 2048, 8192)


def computed(cost: Compute) -> list[Sample]:
    return [Sample(n, cost.seconds(n)) for n in LENGTHS]


def read(cost: Read) -> list[Sample]:
    return [Sample(n, cost.seconds(n), round(n * cost.bytes_per_token)) for n in LENGTHS]


COMPUTE = Compute(fixed_s=0.02, per_token_s=2e-4, per_square_s=1e-8)
READ = Read(fixed_s=0.01, bytes_per_s=1e9, bytes_per_token=4096)


def test_a_known_curve_is_found_again() -> None:
    found = fit_compute(computed(COMPUTE))
    assert found.fixed_s == pytest.approx(0.02)
    assert found.per_token_s == pytest.approx(2e-4)
    assert found.per_square_s == pytest.approx(1e-8)
    line = fit_read(read(READ))
    assert (line.fixed_s, line.bytes_per_s, line.bytes_per_token) == pytest.approx((0.01, 1e9, 4096))


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_no_cost_is_negative_however_noisy_the_times_are(noise: list[float]) -> None:
    samples = [Sample(s.tokens, s.seconds * n) for s, n in zip(computed(COMPUTE), noise, strict=True)]
    found = fit_compute(samples)
    assert min(found.fixed_s, found.per_token_s, found.per_square_s) >= 0


def test_attention_makes_later_tokens_dearer() -> None:
    assert COMPUTE.saved_s(100, context=10_000) == pytest.approx(0.02 + 1e-8 * (10_100**2 - 10_000**2))


def test_too_few_lengths_and_no_reads_are_said() -> None:
    with pytest.raises(BenchError, match="needs 3"):
        fit_compute(computed(COMPUTE)[:2])
    with pytest.raises(BenchError, match="did not take longer"):
        fit_compute([Sample(n, 1.0) for n in LENGTHS])
    with pytest.raises(BenchError, match="is reuse on in the router"):
        fit_read([Sample(0, 0.1) for _ in LENGTHS])


def advice(compute: Compute = COMPUTE, reading: Read = READ, **habits: float) -> Advice:
    return advise(compute, reading, Habits(**habits), block_size=32, capacity_tokens=200_000)  # type: ignore[arg-type]


def test_the_threshold_is_where_reading_begins_to_pay() -> None:
    # 0.01 + n * 4.096e-6 < n * 2e-4 + n * n * 1e-8  <=>  n > 50.9, so two blocks of 32
    assert advice().kv_recompute_threshold == 64
    dear = Read(fixed_s=0.1, bytes_per_s=1e9, bytes_per_token=4096)
    # 0.1 + n * 4.096e-6 < n * 2e-4 + n * n * 1e-8  <=>  n > 497.8
    assert advice(reading=dear).kv_recompute_threshold == 512
    assert advice(reading=Read(0.0, 1e12, 1)).kv_recompute_threshold == 32


def test_reading_that_never_pays_is_advised_against() -> None:
    linear = Compute(0.02, 1e-6, 0.0)
    assert advice(compute=linear, reading=Read(0.01, 1e9, 4096)).kv_recompute_threshold is None


def test_lease_times_follow_the_gaps() -> None:
    found = advice(gap_p50_s=42, gap_p95_s=250)
    assert (found.lease_ttl_s, found.keep_s, found.decoder_kv_blocks_ttl) == (30, 45, 270)


def test_the_budget_leaves_room_for_what_is_generated() -> None:
    roomy = advice(conversations=5, context_tokens=8_000, in_flight=2)
    assert (roomy.wanted, roomy.retention_budget, roomy.held) == (0.2, 0.2, 5)
    tight = advice(conversations=100, context_tokens=8_000, in_flight=10)
    assert (tight.wanted, tight.retention_budget, tight.held) == (4.0, 0.6, 15)
    full = advice(conversations=10, context_tokens=50_000, in_flight=10)
    assert full.retention_budget == 0


def test_impossible_habits_are_named() -> None:
    with pytest.raises(BenchError, match="--gap-p50 300"):
        Habits(gap_p50_s=300, gap_p95_s=200)
    with pytest.raises(BenchError, match="--in-flight 0"):
        Habits(in_flight=0)


def test_capacity_is_read_off_the_metrics() -> None:
    page = '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1\n'
    assert capacity(parse(page), "u") == Capacity(32, 3200)
    with pytest.raises(BenchError, match="does not tell"):
        capacity(parse("# TYPE up gauge\nup 1\n"), "u")


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    written = write_curve(tmp_path / "tune", computed(COMPUTE), read(READ), (COMPUTE, READ), advice(), "here")
    assert [path.suffix for path in written] == [".png", ".svg"]
    assert "kv_recompute_threshold 64" in written[1].read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "give --url of a running cluster"),
        (["--url", "http://h", "--prefill", "nonsense", "--decode", "http://h"], "--prefill nonsense: not a URL"),
        (["--serve", "gpu"], "--serve gpu: only cpu"),
        (["--serve", "cpu", "--lengths", "1,2"], "at least three"),
        (["--serve", "cpu", "--lengths", "1,x"], "write numbers"),
        (["--url", NOBODY, "--prefill", NOBODY, "--decode", NOBODY], "could not be read"),
    ],
)
def test_what_cannot_be_measured_is_said(more: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "--output", str(tmp_path / "out"), *more])
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "out").exists()
