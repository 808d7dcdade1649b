"""Server and claimant over real loopback sockets."""

from __future__ import annotations

import os
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
import zmq.auth

from kvduplex_transfer.leases import messages
from kvduplex_transfer.leases.chain import HashChain
from kvduplex_transfer.leases.claims import Claimant, PendingClaim
from kvduplex_transfer.leases.curve import CurveClient, CurveServer
from kvduplex_transfer.leases.errors import LeaseConfigError
from kvduplex_transfer.leases.server import LeaseServer
from kvduplex_transfer.leases.states import ClaimFailure, RefusalReason
from kvduplex_transfer.leases.table import LeaseTable

Chains = Callable[[Sequence[object]], HashChain]
Soon = Callable[[Callable[[], object]], None]


@pytest.fixture
def claimant() -> Iterator[Claimant]:
    claimant = Claimant(fingerprint=b"same", timeout_s=5.0, clock=time.monotonic)
    yield claimant
    claimant.close()


def answer(claimant: Claimant, claim: PendingClaim, soon: Soon) -> PendingClaim:
    def answered() -> bool:
        claimant.poll()
        return not claim.waiting

    soon(answered)
    return claim


def free_port() -> int:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def raw(endpoint: str) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.rcvtimeo = dealer.sndtimeo = 10_000
    dealer.linger = 0
    dealer.connect(endpoint)
    return context, dealer


def test_a_claim_is_granted_read_and_consumed(
    server: LeaseServer, table: LeaseTable, claimant: Claimant, make_chain: Chains, soon: Soon
) -> None:
    table.hold("lease", make_chain("ABCD"), [4, 5, 6, 7])
    claim = answer(claimant, claimant.claim(server.endpoint, "lease", make_chain("ABCX")), soon)
    assert claim.grant is not None
    assert claim.grant.blocks == [4, 5, 6]
    assert claim.grant.source == messages.Source("engine-1", "127.0.0.1", 5700)
    assert claim.answered_at is not None
    claimant.finish(claim, consumed=True)
    soon(lambda: table.counts().ends == {"consumed": 1})
    assert table.take_loose() == [7, 6, 5, 4]


@pytest.mark.parametrize(
    ("lease", "tokens", "reason"),
    [("other", "A", RefusalReason.UNKNOWN), ("lease", "X", RefusalReason.MISMATCH), ("lease", "", "mismatch")],
)
def test_refusals_come_with_their_reason(
    server: LeaseServer,
    table: LeaseTable,
    claimant: Claimant,
    make_chain: Chains,
    soon: Soon,
    lease: str,
    tokens: str,
    reason: str,
) -> None:
    table.hold("lease", make_chain("A"), [1])
    claim = answer(claimant, claimant.claim(server.endpoint, lease, make_chain(tokens)), soon)
    assert (claim.grant, claim.refusal) == (None, reason)


def test_an_engine_of_another_kind_is_incompatible(
    server: LeaseServer, table: LeaseTable, make_chain: Chains, soon: Soon
) -> None:
    table.hold("lease", make_chain("A"), [1])
    other = Claimant(fingerprint=b"other", timeout_s=5.0, clock=time.monotonic)
    claim = answer(other, other.claim(server.endpoint, "lease", make_chain("A")), soon)
    other.close()
    assert claim.refusal == RefusalReason.INCOMPATIBLE
    assert server.refused() == {"incompatible": 1}


def test_an_abandoned_claim_gives_its_grant_back(
    server: LeaseServer, table: LeaseTable, claimant: Claimant, make_chain: Chains, soon: Soon
) -> None:
    table.hold("lease", make_chain("A"), [1])
    unread = claimant.claim(server.endpoint, "lease", make_chain("A"))
    claimant.abandon(unread)
    soon(lambda: table.counts().claim_ends == {"returned": 1})
    read = answer(claimant, claimant.claim(server.endpoint, "lease", make_chain("A")), soon)
    claimant.abandon(read)
    soon(lambda: table.counts().claim_ends == {"returned": 2})
    assert table.snapshot().held == 1


def test_a_dead_endpoint_costs_one_timeout_each_and_then_nothing(make_chain: Chains, clock: Any) -> None:
    claimant = Claimant(fingerprint=b"same", timeout_s=0.25, clock=clock)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(3):
        claim = claimant.claim(endpoint, "lease", make_chain("A"))
        claimant.poll()
        assert claim.waiting
        clock.advance(0.25)
        claimant.poll()
        assert claim.refusal == ClaimFailure.TIMEOUT
    assert claimant.claim(endpoint, "lease", make_chain("A")).refusal == ClaimFailure.UNREACHABLE
    clock.advance(1.0)
    assert claimant.claim(endpoint, "lease", make_chain("A")).waiting, "one claim probes the silent peer"
    assert claimant.claim(endpoint, "lease", make_chain("A")).refusal == ClaimFailure.UNREACHABLE
    claimant.close()


def test_a_silent_endpoint_that_comes_up_is_asked_again(
    table: LeaseTable, server: LeaseServer, make_chain: Chains, clock: Any, soon: Soon
) -> None:
    claimant = Claimant(fingerprint=b"same", timeout_s=0.25, clock=clock)
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    for _ in range(3):
        claimant.claim(endpoint, "lease", make_chain("A"))
        clock.advance(0.25)
        claimant.poll()
    late = LeaseServer(table=table, identity=server._identity, source=server._source, host="127.0.0.1", port=port)
    late.start()
    table.hold("lease", make_chain("A"), [1])
    clock.advance(1.0)
    claim = answer(claimant, claimant.claim(endpoint, "lease", make_chain("A")), soon)
    assert claim.grant is not None
    # ZeroMQ closes connections in the background: an earlier claim may still arrive, its end right behind it.
    soon(lambda: table.counts().claimed - table.counts().claim_ends.total() == 1)
    late.close()
    claimant.close()


def test_a_restarted_engine_knows_no_old_lease(
    table: LeaseTable, server: LeaseServer, claimant: Claimant, make_chain: Chains, soon: Soon
) -> None:
    table.hold("lease", make_chain("A"), [1])
    assert answer(claimant, claimant.claim(server.endpoint, "lease", make_chain("A")), soon).grant
    port = int(server.endpoint.rsplit(":", 1)[1])
    server.close()
    reborn = LeaseServer(
        table=LeaseTable(limits=table.limits, clock=time.monotonic),
        identity=server._identity,
        source=server._source,
        host="127.0.0.1",
        port=port,
    )
    reborn.start()
    claim = answer(claimant, claimant.claim(server.endpoint, "lease", make_chain("A")), soon)
    reborn.close()
    assert claim.refusal == RefusalReason.UNKNOWN


def test_a_taken_port_is_refused_with_the_setting_to_change(server: LeaseServer, table: LeaseTable) -> None:
    port = int(server.endpoint.rsplit(":", 1)[1])
    twin = LeaseServer(table=table, identity=server._identity, source=server._source, host="127.0.0.1", port=port)
    with pytest.raises(LeaseConfigError, match=rf":{port} cannot be bound: Address already in use.*lease_port"):
        twin.start()


def test_closing_frees_port_and_thread(server: LeaseServer, table: LeaseTable) -> None:
    before = {thread.name for thread in threading.enumerate()}
    assert "kvduplex-leases" in before
    server.close()
    server.close()
    assert "kvduplex-leases" not in {thread.name for thread in threading.enumerate()}
    port = int(server.endpoint.rsplit(":", 1)[1])
    again = LeaseServer(table=table, identity=server._identity, source=server._source, host="127.0.0.1", port=port)
    again.start()
    again.close()


def test_a_lapsed_lease_on_an_idle_engine_is_announced(table: LeaseTable, make_chain: Chains, soon: Soon) -> None:
    announced = threading.Event()
    server = LeaseServer(
        table=table,
        identity=lambda nonce: messages.Identity(nonce, "e", "m", "v", 32, b"", 0, 0, 1, 30.0, 480.0),
        source=lambda: None,
        host="127.0.0.1",
        port=0,
        on_loose=announced.set,
    )
    server.start()
    table.hold("lease", make_chain("A"), [1], 0.05)
    assert announced.wait(timeout=10)
    server.close()
    assert table.take_loose() == [1]


def test_malformed_messages_are_dropped_and_counted(
    server: LeaseServer, table: LeaseTable, claimant: Claimant, make_chain: Chains, soon: Soon
) -> None:
    context, dealer = raw(server.endpoint)
    for frame in (b"", b"GET / HTTP/1.1", b"KVL\x07x", b"KVL\x01\xc1", b"KVL\x01" + os.urandom(1000)):
        dealer.send(frame)
    dealer.send_multipart([b"KVL\x01", b"a", b"b"])
    soon(lambda: sum(server.dropped().values()) == 6)
    assert server.dropped() == {"magic": 2, "version": 1, "content": 2, "frames": 1}
    context.destroy(linger=0)
    table.hold("lease", make_chain("A"), [1])
    assert answer(claimant, claimant.claim(server.endpoint, "lease", make_chain("A")), soon).grant


def test_an_oversized_message_ends_its_connection_before_it_takes_memory(
    server: LeaseServer, table: LeaseTable, claimant: Claimant, make_chain: Chains, soon: Soon
) -> None:
    context, dealer = raw(server.endpoint)
    before = psutil.Process().memory_info().rss
    dealer.send(b"\0" * (64 << 20))
    table.hold("lease", make_chain("A"), [1])
    assert answer(claimant, claimant.claim(server.endpoint, "lease", make_chain("A")), soon).grant
    context.destroy(linger=0)
    assert psutil.Process().memory_info().rss - before < (200 << 20)


def test_a_flood_is_worked_off_in_bounded_memory_while_others_are_served(
    server: LeaseServer, table: LeaseTable, claimant: Claimant, make_chain: Chains, soon: Soon
) -> None:
    context, dealer = raw(server.endpoint)
    table.hold("lease", make_chain("A"), [1])
    frame = messages.encode(messages.Renew(1, ["lease"]))
    sent, refused = 0, 0
    for _ in range(20_000):  # never reads an answer
        try:
            dealer.send(frame, zmq.NOBLOCK)
            sent += 1
        except zmq.Again:
            refused += 1
    claim = answer(claimant, claimant.claim(server.endpoint, "lease", make_chain("A")), soon)
    assert claim.grant is not None
    assert sent > 0
    context.destroy(linger=0)
    soon(lambda: table.snapshot().held + table.snapshot().claimed == 1)


def test_a_peer_that_never_reads_gets_no_grant_it_could_hold(
    server: LeaseServer, table: LeaseTable, make_chain: Chains, soon: Soon
) -> None:
    """Grants that cannot be delivered are closed at once instead of pinning blocks until they lapse."""
    context, dealer = raw(server.endpoint)
    dealer.rcvhwm = 1
    chain = make_chain(range(100))
    table.hold("lease", chain, range(100))
    for number in range(5_000):
        try:
            dealer.send(messages.encode(messages.Claim(number, "lease", b"same", 32, chain.packed)), zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(0.001)  # yields to the server; the flood itself is what is tested
    soon(lambda: table.snapshot().claims <= table.limits.max_claims)
    context.destroy(linger=0)
    assert server.dropped()["unsent"] + table.counts().refused["busy"] > 0


def test_a_peer_that_returns_before_its_old_connection_ends_is_answered(server: LeaseServer) -> None:
    """After a pause of the engine or the network the new connection may come first; both bear the peer's name."""
    name = b"r" + bytes(15)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers = []
    try:
        for number in range(3):
            dealer = context.socket(zmq.DEALER)
            dealer.rcvtimeo = dealer.sndtimeo = 5_000
            dealer.linger = 0
            dealer.routing_id = name
            dealer.connect(server.endpoint)
            peers.append(dealer)
            dealer.send(messages.encode(messages.Hello(number)))
            reply = messages.decode_reply(dealer.recv())
            assert isinstance(reply, messages.Identity)
            assert reply.nonce == number
    finally:
        for dealer in peers:
            dealer.close()
        context.term()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("server", "client", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    (tmp_path / "clients").mkdir()
    (tmp_path / "client.key").rename(tmp_path / "clients" / "client.key")
    return tmp_path


@pytest.mark.parametrize(("name", "admitted"), [("client", True), ("stranger", False)])
def test_curve_admits_known_peers_only(
    keys: Path, table: LeaseTable, make_chain: Chains, soon: Soon, name: str, admitted: bool
) -> None:
    server = LeaseServer(
        table=table,
        identity=lambda nonce: messages.Identity(nonce, "e", "m", "v", 32, b"same", 0, 0, 1, 30.0, 480.0),
        source=lambda: messages.Source("e", "127.0.0.1", 1),
        host="127.0.0.1",
        port=0,
        curve=CurveServer(keys / "server.key_secret", keys / "clients"),
    )
    server.start()
    table.hold("lease", make_chain("A"), [1])
    claimant = Claimant(
        fingerprint=b"same",
        timeout_s=5.0 if admitted else 0.5,
        clock=time.monotonic,
        curve=CurveClient(keys / f"{name}.key_secret", keys / "server.key"),
    )
    claim = answer(claimant, claimant.claim(server.endpoint, "lease", make_chain("A")), soon)
    claimant.close()
    server.close()
    assert (claim.grant is not None) is admitted
    assert admitted or claim.refusal == ClaimFailure.TIMEOUT


@pytest.mark.parametrize("file", ["absent.key_secret", "server.key"])
def test_wrong_key_files_are_named(keys: Path, table: LeaseTable, server: LeaseServer, file: str) -> None:
    locked = LeaseServer(
        table=table,
        identity=server._identity,
        source=server._source,
        host="127.0.0.1",
        port=0,
        curve=CurveServer(keys / file),
    )
    with pytest.raises(LeaseConfigError, match=file):
        locked.start()
