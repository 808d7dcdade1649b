"""Looking at a peer over real sockets, and judging what was seen."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import zmq

from kvduplex.doctor_peer import Listener, PeerPorts, PeerSeen, judge_peer, look_at_peer
from kvduplex_transfer.interface import Role, Severity

FAIL, WARN, OK = Severity.FAIL, Severity.WARN, Severity.OK


class Engine(BaseHTTPRequestHandler):
    """As much of vLLM's HTTP server as the doctor asks."""

    health = 200

    def do_GET(self) -> None:
        body = json.dumps({"version": "0.29.0"}).encode() if self.path == "/version" else b""
        self.send_response(200 if self.path == "/version" else self.health)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silence."""


@pytest.fixture
def peer() -> Iterator[PeerPorts]:
    """An HTTP server and two ZeroMQ listeners on loopback, as an engine has them."""
    context = zmq.Context()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        sockets = [context.socket(zmq.ROUTER) for _ in range(2)]
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in sockets]
        yield PeerPorts(server.server_port, *ports)
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
        context.destroy(linger=0)


def problems(seen: PeerSeen, ports: PeerPorts, vllm: str) -> dict[str, Severity]:
    found = judge_peer(seen, ports, vllm=vllm)
    assert all(finding.why and finding.fix for finding in found if finding.severity is not OK)
    return {finding.check: finding.severity for finding in found if finding.severity is not OK}


def test_a_peer_that_has_everything(peer: PeerPorts) -> None:
    seen = look_at_peer("127.0.0.1", peer)
    assert seen.healthy
    assert seen.vllm == "0.29.0"
    assert problems(seen, peer, vllm="0.29.0") == {"peer.address": WARN}  # loopback is this host


def test_closed_ports_are_told_apart_from_others(peer: PeerPorts) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[1]
    seen = look_at_peer("127.0.0.1", PeerPorts(closed, peer.http, closed))
    assert problems(seen, peer, vllm="0.29.0") == {
        "peer.address": WARN,
        "peer.http": FAIL,
        "peer.version": WARN,
        "peer.side_channel": FAIL,  # an HTTP server
        "peer.lease": WARN,
    }
    assert seen.http.error == "Connection refused"
    assert seen.side_channel == Listener(open=True, zeromq=False)


def test_nothing_is_sent_to_the_side_channel() -> None:
    """The listener of vLLM ends at a message it cannot unpack, and the doctor must not be what breaks it."""
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                received.append(connection.recv(1024))

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        look_at_peer("127.0.0.1", PeerPorts(1, port, 1))
        thread.join(10)
    assert received == [b""]


SEEN = PeerSeen("10.0.1.20", ("10.0.1.20",), Listener(True), True, "0.29.0", Listener(True, True), Listener(True, True))


def test_equal_releases_agree_whatever_their_build() -> None:
    ports = PeerPorts.usual(Role.DECODE)
    assert problems(replace(SEEN, vllm="0.29.0+cpu"), ports, vllm="0.29.0") == {}
    assert problems(replace(SEEN, vllm="0.29.0.1.2"), ports, vllm="0.29.0") == {}


@pytest.mark.parametrize(
    ("change", "own", "expected"),
    [
        ({"vllm": "0.32.0"}, "0.29.0", {"peer.version": FAIL}),
        ({"vllm": None}, "0.29.0", {"peer.version": WARN}),
        ({}, "", {"peer.version": WARN}),
        ({"healthy": False}, "0.29.0", {"peer.http": WARN}),
        ({"http": Listener(False, error="timed out"), "healthy": False}, "0.29.0", {"peer.http": FAIL}),
        ({"side_channel": Listener(False, error="timed out")}, "0.29.0", {"peer.side_channel": FAIL}),
        ({"lease": Listener(False, error="Connection refused")}, "0.29.0", {"peer.lease": WARN}),
        ({"addresses": ()}, "0.29.0", {"peer.address": FAIL}),
        ({"host": "0.0.0.0"}, "0.29.0", {"peer.address": FAIL}),
        ({"addresses": ("fe80::1%eth0",)}, "0.29.0", {}),
    ],
)
def test_what_is_wrong_with_a_peer(change: dict[str, Any], own: str, expected: dict[str, Severity]) -> None:
    assert problems(replace(SEEN, **change), PeerPorts.usual(Role.DECODE), vllm=own) == expected


@pytest.mark.parametrize("name", ["kvduplex-no-such-host.invalid", "10.0.1.20:8200", "a..b", "a" * 70])
def test_a_name_that_does_not_resolve(name: str) -> None:
    ports = PeerPorts.usual(Role.PREFILL)
    seen = look_at_peer(name, ports, deadline_s=0.2)
    assert problems(seen, ports, vllm="0.29.0") == {"peer.address": FAIL}
