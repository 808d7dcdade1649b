"""Shared fixtures of the lease tests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from kvduplex_transfer.leases.chain import HashChain


class FakeClock:
    """Monotonic seconds that move only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def chain_of(tokens: Sequence[object]) -> HashChain:
    """The chain of a sequence whose items stand for one block each."""
    hashes: list[bytes] = []
    parent = b"root"
    for token in tokens:
        parent = hashlib.sha256(parent + repr(token).encode()).digest()
        hashes.append(parent)
    return HashChain.of(hashes)


@pytest.fixture
def make_chain() -> object:
    return chain_of
