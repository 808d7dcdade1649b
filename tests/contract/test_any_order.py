"""Whatever happens in whatever order: nothing hangs, nothing but our errors comes out, and closing ends it all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvduplex_transfer.errors import TransferError
from kvduplex_transfer.interface import Peer, TransferHandle

if TYPE_CHECKING:
    from tests.contract.conftest import Memory, Opened, PeerProcess

TRANSPORTS = "own memory"
SIZE = 2 << 20
BLOCKS = 256
STEPS = 40


class World:
    """One agent, two peers in processes of their own, and everything that may happen to them."""

    def __init__(self, opened: Opened, memory: Callable[..., Memory], dice: random.Random) -> None:
        self.opened, self.dice = opened, dice
        self.agent = opened.agent("any")
        self.buffers = [memory(self.agent, SIZE) for _ in range(2)]
        self.peers = [opened.peer_process(size=SIZE) for _ in range(2)]
        for peer in self.peers:
            self.agent.add_peer(peer.metadata)
        self.handles: list[TransferHandle] = []

    def some_peer(self) -> PeerProcess:
        return self.dice.choice(self.peers)

    def read(self) -> None:
        peer, buffer, count = self.some_peer(), self.dice.choice(self.buffers), self.dice.choice([1, 3, BLOCKS])
        far = [peer.block(self.dice.randrange(BLOCKS) * SIZE // BLOCKS, SIZE // BLOCKS) for _ in range(count)]
        notify = self.dice.choice([None, b"read"])
        self.handles.append(
            self.agent.read(Peer(peer.name), far, buffer.blocks(range(count), SIZE // BLOCKS), notify=notify)
        )

    def wait(self) -> None:
        if self.handles:
            self.agent.wait(self.dice.choice(self.handles), 0.02)

    def release(self) -> None:
        if self.handles:
            self.agent.release(self.dice.choice(self.handles))

    def poll(self) -> None:
        if self.handles:
            self.agent.poll(self.dice.choice(self.handles))

    def freeze(self) -> None:
        with suppress(ProcessLookupError):
            self.some_peer().stop()

    def thaw(self) -> None:
        self.some_peer().go_on()

    def restart(self) -> None:
        index = self.dice.randrange(len(self.peers))
        self.peers[index].kill()
        self.peers[index] = self.opened.peer_process(self.peers[index].name, size=SIZE, exact=True)
        self.agent.add_peer(self.peers[index].metadata)

    def remove(self) -> None:
        self.agent.remove_peer(Peer(self.some_peer().name))

    def add(self) -> None:
        self.agent.add_peer(self.some_peer().metadata)

    def add_cut(self) -> None:
        metadata = self.some_peer().metadata
        self.agent.add_peer(metadata[: self.dice.randrange(len(metadata))])

    def notify(self) -> None:
        self.agent.notify(Peer(self.some_peer().name), b"hello")

    def register_again(self) -> None:
        buffer = self.dice.choice(self.buffers)
        self.agent.deregister(buffer.regions)
        buffer.regions = self.agent.register([region.memory for region in buffer.regions])


EVENTS = [World.read] * 5 + [World.wait, World.release, World.poll, World.freeze, World.thaw, World.thaw]
EVENTS += [World.restart, World.remove, World.add, World.add_cut, World.notify, World.register_again]


@pytest.mark.parametrize("seed", [1])
def test_events_in_any_order(
    opened: Opened, memory: Callable[..., Memory], caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    world = World(opened, memory, random.Random(seed))
    outcomes: Counter[str] = Counter()

    for _ in range(STEPS):
        try:
            world.dice.choice(EVENTS)(world)
            outcomes["fine"] += 1
        except TransferError as error:
            outcomes[type(error).__name__] += 1
    world.agent.close()

    at_close = [buffer.bytes.copy() for buffer in world.buffers]
    for peer in world.peers:
        peer.go_on()
        peer.has_run()
    assert all(np.array_equal(buffer.bytes, then) for buffer, then in zip(world.buffers, at_close, strict=True))
    assert outcomes["fine"] > STEPS / 3
    assert len(outcomes) > 1
    assert caplog.records == []
