"""Peers that end, with and without warning."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvduplex_transfer.errors import InvalidDescriptorError, PeerLostError, TransferError
from kvduplex_transfer.interface import TransferAgent

if TYPE_CHECKING:
    from tests.contract.conftest import Connect, Memory, Opened, PeerProcess

TRANSPORTS = "own memory"
BOUND_S = 30.0


def test_reading_from_a_dead_peer_fails_in_bounded_time(
    opened: Opened, reader: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    process, local = opened.peer_process(), memory(reader, 4096)
    peer = connect(reader, process)
    process.kill()
    begun = time.monotonic()

    with pytest.raises(TransferError):
        reader.wait(reader.read(peer, [process.block(0, 4096)], [local.block(0, 4096)]), BOUND_S)

    assert time.monotonic() - begun < BOUND_S
    assert not local.bytes.any()


def test_a_peer_seen_to_be_gone_is_refused_until_it_is_added_again(
    opened: Opened,
    reader: TransferAgent,
    memory: Callable[..., Memory],
    connect: Connect,
    eventually: Callable[..., None],
) -> None:
    process, local = opened.peer_process(seed=2), memory(reader, 4096)
    peer = connect(reader, process)
    process.kill()

    def refused() -> bool:
        try:
            reader.notify(peer, b"are you there")
        except PeerLostError:
            return True
        return False

    eventually(refused, "the loss is noticed")
    with pytest.raises(PeerLostError, match="is gone; add_peer with the metadata of its new incarnation"):
        reader.read(peer, [process.block(0, 4096)], [local.block(0, 4096)])

    again = opened.peer_process(process.name, seed=3, exact=True)
    peer = connect(reader, again)
    reader.wait(reader.read(peer, [again.block(0, 4096)], [local.block(0, 4096)]), BOUND_S)
    assert np.array_equal(local.bytes, again.bytes[:4096])


def test_a_peer_that_was_gone_before_it_was_added_is_found_out(
    opened: Opened, reader: TransferAgent, memory: Callable[..., Memory]
) -> None:
    process, local = opened.peer_process(), memory(reader, 4096)
    process.kill()

    def read() -> None:
        peer = reader.add_peer(process.metadata)
        reader.wait(reader.read(peer, [process.block(0, 4096)], [local.block(0, 4096)]), BOUND_S)

    with pytest.raises(TransferError):
        read()


def test_a_region_that_its_owner_took_back_is_refused_once_that_is_known(
    reader: TransferAgent, remote: PeerProcess, memory: Callable[..., Memory], connect: Connect
) -> None:
    local, peer = memory(reader, 4096), connect(reader, remote)
    remote.do("deregister")
    try:
        reader.add_peer(remote.refresh())
        with pytest.raises(InvalidDescriptorError, match="outside registered memory"):
            reader.read(peer, [remote.block(0, 4096)], [local.block(0, 4096)])
    finally:
        remote.do("reregister")

    reader.add_peer(remote.refresh())
    handle = reader.read(peer, [remote.block(0, 4096)], [local.block(0, 4096)])
    reader.wait(handle, BOUND_S)
    assert np.array_equal(local.bytes, remote.bytes[:4096])


def test_a_region_taken_back_during_a_read_ends_the_read(
    opened: Opened, reader: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    """With one-sided reads an owner cannot know who reads; the reader's outcome may be either, but it comes."""
    process, local = opened.peer_process(size=8 << 20), memory(reader, 8 << 20)
    peer = connect(reader, process)

    handle = reader.read(peer, [process.block(0, 8 << 20)], [local.block(0, 8 << 20)])
    process.do("deregister")

    try:
        reader.wait(handle, BOUND_S)
    except TransferError:
        return
    assert np.array_equal(local.bytes, process.bytes)
