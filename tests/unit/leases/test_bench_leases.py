"""The renewal benchmark on a small trace."""

from __future__ import annotations

import pytest

from kvduplex_bench.leases import generate, run


def test_the_same_seed_gives_the_same_trace() -> None:
    assert generate(50, 3) == generate(50, 3)
    assert generate(50, 3) != generate(50, 4)


@pytest.mark.parametrize("seed", [1, 2])
def test_renewal_pins_a_fraction_for_nearly_the_same_reuse(seed: int) -> None:
    fixed, renewed = run(200, seed)
    assert fixed.reused_blocks <= fixed.reusable_blocks == renewed.reusable_blocks
    assert renewed.reused_blocks > 0.98 * fixed.reused_blocks
    assert renewed.pinned_block_s < fixed.pinned_block_s / 3
    assert renewed.peak_blocks < fixed.peak_blocks


def test_without_any_sign_from_clients_little_is_saved() -> None:
    fixed, renewed = run(200, 1, closing=0.0)
    assert renewed.pinned_block_s > fixed.pinned_block_s / 2
