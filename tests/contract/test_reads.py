"""A read brings exactly the bytes that were asked for, whatever the list of blocks, the peer or the thread."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvduplex_transfer.blocks import BlockArray
from kvduplex_transfer.interface import BlockRef, TransferAgent, TransferState

if TYPE_CHECKING:
    from tests.contract.conftest import Connect, Memory, Opened, PeerProcess

TRANSPORTS = "every"
WAIT_S = 20.0


@pytest.mark.parametrize("count", [1, 2, 33, 512, 4096])
def test_every_block_arrives_where_it_was_asked_for(
    reader: TransferAgent, remote: PeerProcess, memory: Callable[..., Memory], connect: Connect, count: int
) -> None:
    length = 1536
    local = memory(reader, count * length)
    order = np.random.default_rng(count).permutation(remote.bytes.size // length)[:count]

    handle = reader.read(
        connect(reader, remote),
        BlockArray.strided(remote.address, order, stride=length, length=length),
        local.blocks(range(count), length),
    )
    reader.wait(handle, WAIT_S)
    reader.release(handle)

    expected = remote.bytes[: remote.bytes.size // length * length].reshape(-1, length)[order].reshape(-1)
    assert handle.bytes == count * length
    assert np.array_equal(local.bytes, expected)


def test_plain_block_lists_do_as_arrays_do(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    local, far = memory(reader, 4096), memory(owner, 4096, seed=3)

    handle = reader.read(
        connect(reader, owner), [far.block(0, 96), far.block(4000, 96)], [local.block(1, 96), local.block(97, 96)]
    )
    reader.wait(handle, WAIT_S)
    reader.release(handle)

    assert np.array_equal(local.bytes[1:193], np.concatenate([far.bytes[:96], far.bytes[4000:]]))
    assert local.bytes[0] == 0
    assert not local.bytes[193:].any()


def test_a_partial_read_leaves_the_rest_untouched(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    local, far = memory(reader, 64 * 1024, seed=4), memory(owner, 64 * 1024, seed=5)
    before, wanted = local.bytes.copy(), np.array([1, 3, 7, 15])

    handle = reader.read(connect(reader, owner), far.blocks(wanted, 4096), local.blocks(wanted, 4096))
    reader.wait(handle, WAIT_S)
    reader.release(handle)

    read, old = local.bytes.reshape(-1, 4096), before.reshape(-1, 4096)
    rest = np.setdiff1d(np.arange(16), wanted)
    assert np.array_equal(read[wanted], far.bytes.reshape(-1, 4096)[wanted])
    assert np.array_equal(read[rest], old[rest])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_list_of_blocks_reads_as_numpy_copies(
    reader: TransferAgent, remote: PeerProcess, memory: Callable[..., Memory], connect: Connect, data: st.DataObject
) -> None:
    size = 1 << 16
    local, peer = memory(reader, size), connect(reader, remote)
    lengths = data.draw(st.lists(st.integers(1, 4096), min_size=1, max_size=12))
    far = [data.draw(st.integers(0, remote.bytes.size - length)) for length in lengths]
    near = np.cumsum([0, *lengths[:-1]]).tolist()

    handle = reader.read(
        peer,
        [remote.block(offset, length) for offset, length in zip(far, lengths, strict=True)],
        [local.block(offset, length) for offset, length in zip(near, lengths, strict=True)],
    )
    reader.wait(handle, WAIT_S)
    reader.release(handle)

    expected = np.concatenate([remote.bytes[at : at + length] for at, length in zip(far, lengths, strict=True)])
    assert np.array_equal(local.bytes[: expected.size], expected)
    assert not local.bytes[expected.size :].any()
    reader.deregister(local.regions)


def test_reads_from_several_peers_are_kept_apart(
    opened: Opened, reader: TransferAgent, remote: PeerProcess, memory: Callable[..., Memory], connect: Connect
) -> None:
    owners = [opened.agent(f"owner{number}") for number in range(2)]
    sources = [memory(agent, 256 * 1024, seed=20 + number) for number, agent in enumerate(owners)]
    blocks = [source.blocks(range(64), 4096) for source in sources]
    blocks.append(BlockArray.strided(remote.address, range(64), stride=4096, length=4096))
    peers = [connect(reader, agent) for agent in owners] + [connect(reader, remote)]
    local = [memory(reader, 256 * 1024) for _ in peers]

    handles = [
        reader.read(peer, far, near.blocks(range(64), 4096))
        for peer, far, near in zip(peers, blocks, local, strict=True)
    ]
    for handle in handles:
        reader.wait(handle, WAIT_S)
        reader.release(handle)

    contents = [source.bytes for source in sources] + [remote.bytes[: 256 * 1024]]
    assert all(np.array_equal(near.bytes, content) for near, content in zip(local, contents, strict=True))


def test_one_read_may_span_many_regions_of_both_sides(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    near = [memory(reader, 8192) for _ in range(5)]
    far = [memory(owner, 8192, seed=30 + number) for number in range(5)]

    handle = reader.read(
        connect(reader, owner), [item.block(0, 8192) for item in far], [item.block(0, 8192) for item in near]
    )
    reader.wait(handle, WAIT_S)
    reader.release(handle)

    assert all(np.array_equal(here.bytes, there.bytes) for here, there in zip(near, far, strict=True))


def test_an_agent_may_be_used_from_any_thread(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    far, peer = memory(owner, 64 * 1024, seed=6), connect(reader, owner)
    buffers = [memory(reader, 64 * 1024) for _ in range(4)]
    wrong: list[str] = []

    def work(local: Memory) -> None:
        for _ in range(10):
            local.bytes[:] = 0
            handle = reader.read(peer, far.blocks(range(16), 4096), local.blocks(range(16), 4096))
            reader.wait(handle, WAIT_S)
            reader.release(handle)
            if not np.array_equal(local.bytes, far.bytes):
                wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=work, args=(local,)) for local in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_poll_reaches_done_by_itself_and_release_may_be_repeated(
    reader: TransferAgent,
    remote: PeerProcess,
    memory: Callable[..., Memory],
    connect: Connect,
    eventually: Callable[..., None],
) -> None:
    local = memory(reader, 1 << 20)

    handle = reader.read(connect(reader, remote), [remote.block(0, 1 << 20)], [local.block(0, 1 << 20)])
    eventually(lambda: reader.poll(handle) is not TransferState.PENDING, "the read ends")
    states = [reader.poll(handle)]
    for _ in range(3):
        reader.release(handle)
        states.append(reader.poll(handle))

    assert states == [TransferState.DONE] * 4
    assert np.array_equal(local.bytes, remote.bytes[: 1 << 20])


def test_a_peer_in_another_process_reads_back(
    owner: TransferAgent, remote: PeerProcess, memory: Callable[..., Memory]
) -> None:
    far = memory(owner, 4096, seed=8)
    name = remote.do("add_peer", metadata=base64.b64encode(owner.metadata()).decode())
    # Into its first bytes, and back again, for other tests rely on them.
    read = base64.b64decode(remote.do("read", peer=name, address=far.address, length=4096))
    far.bytes[:] = remote.bytes[:4096]
    restored = base64.b64decode(remote.do("read", peer=name, address=far.address, length=4096))

    assert read == np.random.default_rng(8).integers(0, 256, 4096, dtype=np.uint8).tobytes()
    assert restored == remote.bytes[:4096].tobytes()


def test_blocks_of_one_list_may_repeat(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect
) -> None:
    local, far = memory(reader, 8192), memory(owner, 4096, seed=9)
    same = BlockRef(far.address, 4096)

    handle = reader.read(connect(reader, owner), [same, same], [local.block(0, 4096), local.block(4096, 4096)])
    reader.wait(handle, WAIT_S)
    reader.release(handle)

    assert np.array_equal(local.bytes, np.tile(far.bytes, 2))
