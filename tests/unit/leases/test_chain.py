"""Block-hash chains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.errors import InvalidLeaseError

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def chain_of(tokens: Sequence[int]) -> HashChain:
    parent, hashes = b"", []
    for token in tokens:
        parent = hashlib.sha256(parent + bytes([token])).digest()
        hashes.append(parent)
    return HashChain.of(hashes)


@given(TOKENS, TOKENS)
def test_common_length_is_that_of_the_common_tokens(mine: list[int], yours: list[int]) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(mine, yours, strict=False)) if a != b), min(len(mine), len(yours))
    )
    assert chain_of(mine).common_length(chain_of(yours)) == expected
    assert chain_of(yours).common_length(chain_of(mine)) == expected


@given(TOKENS, st.integers(0, 40))
def test_a_prefix_is_the_chain_of_fewer_tokens(tokens: list[int], length: int) -> None:
    assert chain_of(tokens).prefix(length) == chain_of(tokens[:length])


def test_chains_of_different_hash_sizes_prove_nothing() -> None:
    assert HashChain(b"a" * 32, 16).common_length(HashChain(b"a" * 32, 32)) == 0


@pytest.mark.parametrize(("packed", "size"), [(b"a" * 33, 32), (b"a" * 30, 15), (b"a" * 65, 65), (b"", 0)])
def test_odd_sizes_are_refused(packed: bytes, size: int) -> None:
    with pytest.raises(InvalidLeaseError):
        HashChain(packed, size)


def test_hashes_of_mixed_length_are_refused() -> None:
    with pytest.raises(InvalidLeaseError, match="differ in length"):
        HashChain.of([b"a" * 32, b"b" * 16])
