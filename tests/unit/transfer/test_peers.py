"""Who a peer is, when it is gone, and when NIXL may forget it."""

from __future__ import annotations

import pytest

from kvduplex_transfer.errors import PeerLostError, UnknownPeerError
from kvduplex_transfer.peers import PeerRecord, PeerTable
from kvduplex_transfer.regions import RegionMap


def record(name: str = "d0", incarnation: str = "one", *, in_flight: int = 0) -> PeerRecord:
    return PeerRecord(name, f"{name}@{incarnation}", 0, RegionMap(), in_flight)


def test_a_known_peer_is_found_and_others_are_not() -> None:
    peers, known = PeerTable(), record()
    peers.put(known)

    assert peers.find("d0") is known
    with pytest.raises(UnknownPeerError, match=r"'d1' is not known \(known: d0\)"):
        peers.find("d1")
    with pytest.raises(UnknownPeerError, match=r"\(known: none\)"):
        PeerTable().find("d0")


def test_a_lost_peer_is_refused() -> None:
    peers, lost = PeerTable(), record()
    peers.put(lost)
    lost.lost = True

    with pytest.raises(PeerLostError, match="'d0' is gone"):
        peers.find("d0")


def test_a_new_incarnation_retires_the_old_one() -> None:
    peers, old, new = PeerTable(), record(in_flight=1), record(incarnation="two")

    assert peers.put(old) is None
    assert peers.put(old) is None
    assert peers.put(new) is old

    assert peers.find("d0") is new
    assert peers.incarnation("d0@one") is old
    assert peers.incarnation("d0@two") is new
    assert set(map(id, peers.everyone())) == {id(old), id(new)}


def test_a_retired_peer_is_forgotten_once_its_reads_ended() -> None:
    peers, busy, idle = PeerTable(), record("busy", in_flight=2), record("idle")
    for item in (busy, idle):
        peers.put(item)
        assert peers.retire(item.name) is item

    assert peers.drained() == [idle]
    busy.in_flight = 0
    assert peers.drained() == [busy]
    assert peers.drained() == []
    assert peers.everyone() == []
    assert peers.retire("busy") is None


def test_a_peer_may_return_before_it_is_forgotten() -> None:
    peers, back = PeerTable(), record(in_flight=1)
    peers.put(back)
    peers.retire("d0")

    assert peers.incarnation("d0@one") is back
    peers.put(back)
    back.in_flight = 0

    assert peers.drained() == []
    assert peers.find("d0") is back


def test_discarding_takes_a_record_out_wherever_it_is() -> None:
    peers, known, other = PeerTable(), record(), record(incarnation="two")
    peers.put(known)
    peers.discard(other)
    assert peers.find("d0") is known

    peers.discard(known)
    assert peers.everyone() == []
