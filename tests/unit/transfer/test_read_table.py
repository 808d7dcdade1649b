"""Reads in flight, followed with a clock and a NIXL that do as they are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvduplex_transfer.errors import PeerLostError, TransferError, TransferFailedError
from kvduplex_transfer.interface import TransferState
from kvduplex_transfer.native import NativeRead
from kvduplex_transfer.peers import PeerRecord
from kvduplex_transfer.reads import Read, ReadTable
from kvduplex_transfer.regions import RegionMap


class World:
    """Time, and what NIXL answers for each native read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answers: dict[NativeRead, bool | TransferError] = {}
        self.released: list[NativeRead] = []
        self.asked = 0
        self.peer = PeerRecord("d0", "d0@1", 0, RegionMap())
        self.table = ReadTable(is_done=self._is_done, release=self.released.append, clock=lambda: self.now)

    def read(self, number: int, *regions: int) -> tuple[Read, NativeRead]:
        read, native = Read(number, self.peer, frozenset(regions), self.now), NativeRead(f"native {number}")
        self.answers[native] = False
        self.table.add(read, native)
        return read, native

    def _is_done(self, native: NativeRead) -> bool:
        self.asked += 1
        answer = self.answers[native]
        if isinstance(answer, TransferError):
            raise answer
        return answer


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_in_flight_needs_no_looking(world: World) -> None:
    assert world.table.look() is None


def test_a_read_ends_when_nixl_says_so_and_is_released_once(world: World) -> None:
    read, native = world.read(1, 7)
    pause = world.table.look()
    assert (read.state, world.released) == (TransferState.PENDING, [])
    assert pause is not None

    world.answers[native] = True
    world.now += pause
    assert world.table.look() is None

    assert (read.state, read.error, world.released, len(world.table)) == (TransferState.DONE, None, [native], 0)
    assert world.peer.in_flight == 0
    assert read.wait(0)


@pytest.mark.parametrize(("error", "lost"), [(TransferFailedError("broken"), False), (PeerLostError("gone"), True)])
def test_a_failure_is_kept_and_a_lost_peer_is_noted(world: World, error: TransferError, lost: bool) -> None:
    read, native = world.read(1)
    world.answers[native] = error

    world.table.look()

    assert (read.state, read.error, world.peer.lost) == (TransferState.FAILED, error, lost)
    assert world.released == [native]


def test_a_released_read_keeps_its_regions_busy_until_it_ends(world: World) -> None:
    read, native = world.read(1, 7, 8)
    read.settle(TransferFailedError("released"))

    assert world.table.on([8, 9]) == [read]
    assert world.table.on([9]) == []
    world.table.look()
    assert world.table.on([7]) == [read]

    world.answers[native] = True
    world.now += 1
    world.table.look()

    assert world.table.on([7, 8]) == []
    assert read.state is TransferState.FAILED


def test_the_first_outcome_stays(world: World) -> None:
    read, _ = world.read(1)
    first = TransferFailedError("first")

    for error in (first, None, PeerLostError("second")):
        read.settle(error)

    assert (read.state, read.error) == (TransferState.FAILED, first)


def test_a_peer_that_fails_takes_only_its_own_reads(world: World) -> None:
    mine, _ = world.read(1)
    other = PeerRecord("d1", "d1@1", 0, RegionMap())
    theirs = Read(2, other, frozenset(), world.now)
    world.table.add(theirs, NativeRead("other"))

    world.table.fail_peer(world.peer, PeerLostError("removed"))

    assert (mine.state, theirs.state) == (TransferState.FAILED, TransferState.PENDING)
    assert (world.peer.in_flight, other.in_flight) == (1, 1)


def test_looks_are_eager_at_first_then_rare_and_stay_prompt(world: World) -> None:
    world.read(1)
    pauses = []
    for age_us in (0, 100, 199, 201, 3_200, 16_000, 32_000, 10_000_000):
        world.now = 100.0 + age_us / 1e6
        pauses.append(world.table.look())

    assert pauses == pytest.approx([0, 0, 0, 50e-6, 100e-6, 500e-6, 1e-3, 1e-3])


def test_calls_between_looks_do_not_ask_again(world: World) -> None:
    world.read(1)
    world.now += 1
    for _ in range(100):
        world.table.look()

    assert world.asked == 1


def test_a_new_read_is_looked_at_at_once(world: World) -> None:
    world.read(1)
    world.now += 10
    world.table.look()
    _, native = world.read(2)
    world.answers[native] = True

    world.table.look()

    assert world.released == [native]


def test_dropping_frees_every_handle_and_fails_every_read(world: World) -> None:
    reads = [world.read(number, number) for number in range(3)]

    world.table.drop_all(TransferFailedError("closed"))

    assert world.released == [native for _, native in reads]
    assert all(read.state is TransferState.FAILED for read, _ in reads)
    assert (len(world.table), world.peer.in_flight) == (0, 0)


def test_a_handle_that_cannot_be_freed_fails_its_read(world: World) -> None:
    def refuse(_: NativeRead) -> None:
        raise TransferFailedError("active")

    table = ReadTable(is_done=lambda _: True, release=refuse, clock=lambda: 0.0)
    read = Read(1, world.peer, frozenset(), 0.0)
    table.add(read, NativeRead("x"))

    table.look()

    assert read.state is TransferState.FAILED
    assert "could not be released: active" in str(read.error)


def test_looking_goes_on_after_the_failure_of_one(world: World) -> None:
    outcomes: list[Callable[[], object]] = []
    _, broken = world.read(1)
    fine, done = world.read(2)
    world.answers |= {broken: TransferFailedError("broken"), done: True}

    outcomes.append(world.table.look)
    assert outcomes[0]() is None

    assert fine.state is TransferState.DONE
    assert world.released == [broken, done]
