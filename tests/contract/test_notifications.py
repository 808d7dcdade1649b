"""Notifications arrive once, in order, and after the bytes they speak of."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvduplex_transfer.errors import InvalidDescriptorError
from kvduplex_transfer.interface import Notification, TransferAgent

if TYPE_CHECKING:
    from tests.contract.conftest import Connect, Memory, PeerProcess, Receive


def test_messages_of_one_peer_arrive_in_order_and_once(
    reader: TransferAgent, owner: TransferAgent, connect: Connect, receive: Receive
) -> None:
    peer = connect(reader, owner)
    sent = [Notification(reader.name, f"message {number}".encode()) for number in range(100)]

    for message in sent:
        reader.notify(peer, message.payload)

    assert receive(owner, len(sent)) == sent
    assert owner.notifications() == ()


def test_the_owner_is_told_after_the_last_byte(
    reader: TransferAgent,
    owner: TransferAgent,
    memory: Callable[..., Memory],
    connect: Connect,
    receive: Receive,
) -> None:
    local, far = memory(reader, 1 << 20), memory(owner, 1 << 20, seed=60)

    handle = reader.read(
        connect(reader, owner), far.blocks(range(256), 4096), local.blocks(range(256), 4096), notify=b"blocks 0..255"
    )
    received = receive(owner, 1)
    arrived = local.bytes.copy()
    reader.wait(handle, 20.0)
    reader.release(handle)

    assert np.array_equal(arrived, far.bytes)
    assert received == [Notification(reader.name, b"blocks 0..255")]


def test_processes_exchange_messages(
    owner: TransferAgent, remote: PeerProcess, connect: Connect, receive: Receive, eventually: Callable[..., None]
) -> None:
    peer = connect(owner, remote)
    name = remote.do("add_peer", metadata=base64.b64encode(owner.metadata()).decode())
    there: list[list[str]] = []

    def heard() -> bool:
        there.extend(remote.do("notifications"))
        return bool(there)

    owner.notify(peer, b"ping")
    eventually(heard, "the process hears")
    remote.do("notify", peer=name, payloads=["pong", "pong 2"])

    assert there == [[owner.name, "ping"]]
    assert receive(owner, 2) == [Notification(remote.name, b"pong"), Notification(remote.name, b"pong 2")]


def test_a_failed_read_tells_nobody(
    reader: TransferAgent,
    owner: TransferAgent,
    memory: Callable[..., Memory],
    connect: Connect,
    receive: Receive,
) -> None:
    local, far, peer = memory(reader, 4096), memory(owner, 4096), connect(reader, owner)

    with pytest.raises(InvalidDescriptorError):
        reader.read(peer, [far.block(0, 8192)], [local.block(0, 8192)], notify=b"never")
    reader.notify(peer, b"marker")

    assert receive(owner, 1) == [Notification(reader.name, b"marker")]


def test_an_empty_message_is_refused(reader: TransferAgent, owner: TransferAgent, connect: Connect) -> None:
    with pytest.raises(InvalidDescriptorError, match="at least one byte"):
        reader.notify(connect(reader, owner), b"")


def test_a_long_message_arrives_whole(
    reader: TransferAgent, owner: TransferAgent, connect: Connect, receive: Receive
) -> None:
    payload = np.random.default_rng(61).bytes(1 << 20)

    reader.notify(connect(reader, owner), payload)

    assert receive(owner, 1) == [Notification(reader.name, payload)]
