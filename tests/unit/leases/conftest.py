"""Shared fixtures of the lease tests."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvduplex_transfer.leases import messages
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.records import LeaseLimits
from kvduplex_transfer.leases.server import LeaseServer
from kvduplex_transfer.leases.table import LeaseTable


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


def eventually(check: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Poll until `check` is true.

    Raises:
        AssertionError: It was still false at the deadline.
    """
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def soon() -> object:
    return eventually


def identity(nonce: int) -> messages.Identity:
    return messages.Identity(nonce, "engine-1", "tiny", "0.32.0", 32, b"same", 0, 0, 10, 30.0, 480.0)


SOURCE = messages.Source("engine-1", "127.0.0.1", 5700)


@pytest.fixture
def table() -> LeaseTable:
    limits = LeaseLimits(budget_blocks=100, lease_ttl_s=30, max_ttl_s=480, claim_ttl_s=30)
    return LeaseTable(limits=limits, clock=time.monotonic)


@pytest.fixture
def server(table: LeaseTable) -> Iterator[LeaseServer]:
    server = LeaseServer(table=table, identity=identity, source=lambda: SOURCE, host="127.0.0.1", port=0)
    server.start()
    yield server
    server.close()
