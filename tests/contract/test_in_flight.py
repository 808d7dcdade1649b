"""What may happen while bytes are on their way: the peer is frozen, so that they stay so as long as wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvduplex_transfer.errors import (
    InvalidDescriptorError,
    TransferError,
    TransferFailedError,
    TransferTimeoutError,
    UnknownPeerError,
)
from kvduplex_transfer.interface import Peer, TransferAgent, TransferHandle, TransferState

if TYPE_CHECKING:
    from tests.contract.conftest import Memory, Opened, PeerProcess

SIZE = 8 << 20
TRANSPORTS = "served"
WAIT_S = 20.0


class Frozen:
    """A read that cannot end, because its peer does not run."""

    def __init__(self, opened: Opened, memory: Callable[..., Memory]) -> None:
        self.agent: TransferAgent = opened.agent("reader")
        self.process: PeerProcess = opened.peer_process(size=SIZE, seed=11)
        self.peer: Peer = self.agent.add_peer(self.process.metadata)
        self.local: Memory = memory(self.agent, SIZE)
        self._read_all()  # connections are up, so that what follows is a read and not a handshake
        self.local.bytes[:] = 0
        self.process.stop()
        self.handle: TransferHandle = self.start()

    def start(self) -> TransferHandle:
        return self.agent.read(self.peer, [self.process.block(0, SIZE)], [self.local.block(0, SIZE)])

    def _read_all(self) -> None:
        handle = self.start()
        self.agent.wait(handle, WAIT_S)
        self.agent.release(handle)


def tasks() -> set[str]:
    """Threads of this process, native ones as well."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.fixture
def frozen(opened: Opened, memory: Callable[..., Memory]) -> Iterator[Frozen]:
    read = Frozen(opened, memory)
    yield read
    read.process.go_on()


def test_waiting_ends_at_its_deadline_and_the_read_goes_on(frozen: Frozen) -> None:
    with pytest.raises(TransferTimeoutError, match=r"pending after 0\.05 s"):
        frozen.agent.wait(frozen.handle, 0.05)
    assert frozen.agent.poll(frozen.handle) is TransferState.PENDING

    frozen.process.go_on()
    frozen.agent.wait(frozen.handle, WAIT_S)

    assert np.array_equal(frozen.local.bytes, frozen.process.bytes)


def test_memory_stays_registered_until_a_read_really_ended(frozen: Frozen, eventually: Callable[..., None]) -> None:
    """NIXL would free the read's handle at once, and the bytes would still arrive."""
    frozen.agent.release(frozen.handle)
    assert frozen.agent.poll(frozen.handle) is TransferState.FAILED
    with pytest.raises(InvalidDescriptorError, match="1 reads still write to these regions"):
        frozen.agent.deregister(frozen.local.regions)

    frozen.process.go_on()

    def deregistered() -> bool:
        try:
            frozen.agent.deregister(frozen.local.regions)
        except InvalidDescriptorError:
            return False
        return True

    eventually(deregistered, "the released read ends")
    frozen.local.bytes[:] = 0
    frozen.process.has_run()
    assert not frozen.local.bytes.any()


def test_a_killed_peer_fails_its_reads(frozen: Frozen) -> None:
    frozen.process.kill()

    with pytest.raises(TransferError):
        frozen.agent.wait(frozen.handle, WAIT_S)
    assert frozen.agent.poll(frozen.handle) is TransferState.FAILED
    with pytest.raises(TransferError):
        frozen.agent.wait(frozen.start(), WAIT_S)
    frozen.agent.deregister(frozen.local.regions)


def test_removing_a_peer_fails_its_reads_at_once(frozen: Frozen) -> None:
    frozen.agent.remove_peer(frozen.peer)

    with pytest.raises(TransferFailedError, match="was removed"):
        frozen.agent.wait(frozen.handle, WAIT_S)
    with pytest.raises(UnknownPeerError):
        frozen.start()
    with pytest.raises(InvalidDescriptorError):
        frozen.agent.deregister(frozen.local.regions)


def test_a_removed_peer_may_come_back_while_its_read_ends(frozen: Frozen) -> None:
    frozen.agent.remove_peer(frozen.peer)
    frozen.peer = frozen.agent.add_peer(frozen.process.metadata)
    frozen.process.go_on()

    frozen.agent.wait(frozen.start(), WAIT_S)

    assert np.array_equal(frozen.local.bytes, frozen.process.bytes)


def test_closing_ends_waits_and_writes(frozen: Frozen) -> None:
    """Once `close` returned, the buffer is its owner's again, even when the peer wakes up."""
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            frozen.agent.wait(frozen.handle, WAIT_S)
        except TransferError as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    frozen.agent.close()
    frozen.local.bytes[:] = 255
    frozen.process.go_on()
    waiter.join(WAIT_S)

    assert not waiter.is_alive()
    assert len(failures) == 1
    frozen.process.has_run()
    assert (frozen.local.bytes == 255).all()


def test_other_peers_are_served_meanwhile(frozen: Frozen, owner: TransferAgent, memory: Callable[..., Memory]) -> None:
    far = memory(owner, 4096, seed=12)
    near = memory(frozen.agent, 4096)
    peer = frozen.agent.add_peer(owner.metadata())

    handle = frozen.agent.read(peer, [far.block(0, 4096)], [near.block(0, 4096)])
    frozen.agent.wait(handle, WAIT_S)

    assert np.array_equal(near.bytes, far.bytes)
    assert frozen.agent.poll(frozen.handle) is TransferState.PENDING


def test_a_restarted_peer_replaces_the_frozen_one(frozen: Frozen, opened: Opened) -> None:
    again = opened.peer_process(frozen.process.name, size=SIZE, seed=13, exact=True)

    peer = frozen.agent.add_peer(again.metadata)

    assert peer == frozen.peer
    with pytest.raises(TransferFailedError, match="was restarted"):
        frozen.agent.wait(frozen.handle, WAIT_S)
    half = SIZE // 2
    handle = frozen.agent.read(peer, [again.block(0, half)], [frozen.local.block(0, half)])
    frozen.agent.wait(handle, WAIT_S)


def test_a_failure_that_is_kept_does_not_keep_the_agent(
    opened: Opened, memory: Callable[..., Memory], eventually: Callable[..., None]
) -> None:
    """An exception holds the frames it came through, and NIXL's handles hold the agent that writes to memory."""
    before = tasks()
    frozen = Frozen(opened, memory)
    its_own = tasks() - before
    frozen.process.kill()
    with pytest.raises(TransferError) as first:
        frozen.agent.wait(frozen.handle, WAIT_S)
    with pytest.raises(TransferError) as second:
        frozen.agent.wait(frozen.start(), WAIT_S)

    frozen.agent.close()

    assert isinstance(first.value, TransferFailedError)
    assert isinstance(second.value, TransferError)
    assert its_own
    eventually(lambda: not its_own & tasks(), "its threads end")


def test_closing_with_a_removed_peer_whose_read_goes_on(frozen: Frozen, caplog: pytest.LogCaptureFixture) -> None:
    frozen.agent.remove_peer(frozen.peer)
    frozen.agent.close()

    assert caplog.records == []
