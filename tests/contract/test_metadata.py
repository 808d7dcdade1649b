"""Metadata that is not what it should be never reaches native code, and never costs a peer that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvduplex_transfer.errors import MetadataError
from kvduplex_transfer.interface import TransferAgent

if TYPE_CHECKING:
    from tests.contract.conftest import Memory

_quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_quick
@given(junk=st.binary(max_size=400))
@example(junk=b"")
@example(junk=b"KVDX")
@example(junk=b"nixlSerDes|Agent")
def test_junk_is_refused(reader: TransferAgent, junk: bytes) -> None:
    with pytest.raises(MetadataError):
        reader.add_peer(junk)


@_quick
@given(data=st.data())
def test_a_cut_is_refused(reader: TransferAgent, owner: TransferAgent, data: st.DataObject) -> None:
    metadata = owner.metadata()

    with pytest.raises(MetadataError):
        reader.add_peer(metadata[: data.draw(st.integers(0, len(metadata) - 1))])


@_quick
@given(data=st.data())
def test_a_changed_byte_is_refused(reader: TransferAgent, owner: TransferAgent, data: st.DataObject) -> None:
    metadata = bytearray(owner.metadata())
    metadata[data.draw(st.integers(0, len(metadata) - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises(MetadataError):
        reader.add_peer(bytes(metadata))


def test_an_agent_refuses_its_own(reader: TransferAgent) -> None:
    with pytest.raises(MetadataError, match="own name"):
        reader.add_peer(reader.metadata())


def test_a_bad_update_does_not_cost_the_peer(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory]
) -> None:
    local, far = memory(reader, 4096), memory(owner, 4096, seed=40)
    metadata = owner.metadata()
    peer = reader.add_peer(metadata)

    with pytest.raises(MetadataError):
        reader.add_peer(metadata[:-10])
    handle = reader.read(peer, [far.block(0, 4096)], [local.block(0, 4096)])
    reader.wait(handle, 20.0)

    assert np.array_equal(local.bytes, far.bytes)
    reader.remove_peer(peer)


def test_newer_metadata_replaces_older_and_older_does_not_come_back(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory]
) -> None:
    older = owner.metadata()
    local, far = memory(reader, 4096), memory(owner, 4096, seed=41)
    newer = owner.metadata()

    peers = {reader.add_peer(older), reader.add_peer(newer), reader.add_peer(older)}
    (peer,) = peers
    handle = reader.read(peer, [far.block(0, 4096)], [local.block(0, 4096)])
    reader.wait(handle, 20.0)

    assert np.array_equal(local.bytes, far.bytes)
    reader.remove_peer(peer)


def test_removing_a_peer_twice_does_nothing(reader: TransferAgent, owner: TransferAgent) -> None:
    peer = reader.add_peer(owner.metadata())

    reader.remove_peer(peer)
    reader.remove_peer(peer)

    assert reader.add_peer(owner.metadata()) == peer
    reader.remove_peer(peer)
