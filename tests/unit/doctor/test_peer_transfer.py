"""The doctor's transfer test against a real offer, and against whatever else may be at its port."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from kvduplex import doctor
from kvduplex.doctor_transfer import transfer_finding
from kvduplex_bench.transfer_peer import backend_named, offered, serve
from kvduplex_transfer.interface import Severity


@contextmanager
def offering(length: int) -> Iterator[int]:
    """What `kvduplex bench transfer --listen` does, in a thread."""
    ended = threading.Event()
    with (
        offered(backend_named("host"), length=length, seed=3) as offer,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        thread = threading.Thread(target=serve, args=(listener, offer), kwargs={"until": ended.is_set})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join(10)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nobody listens on, and nobody can take."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]


def test_blocks_are_read_from_a_peer_that_offers_some() -> None:
    with offering(3 * 65536) as port:
        finding = transfer_finding("host", "127.0.0.1", port)
        assert finding.severity is Severity.OK, finding
        assert "blocks of 64 KiB" in finding.seen
        assert transfer_finding("neuron", "127.0.0.1", port).severity is Severity.FAIL


def test_a_peer_without_an_offer_is_said_to_be_untested(closed_port: int) -> None:
    finding = transfer_finding("host", "127.0.0.1", closed_port)
    assert finding.severity is Severity.WARN
    assert f"--listen 127.0.0.1:{closed_port}" in finding.fix


def test_too_little_memory_to_read_from() -> None:
    with offering(4096) as port:
        finding = transfer_finding("host", "127.0.0.1", port)
    assert (finding.severity, finding.check) == (Severity.FAIL, "peer.transfer")
    assert "--bytes" in finding.seen


def test_another_program_at_the_port_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            for _ in range(2):  # the doctor first sees that the port is open
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        finding = transfer_finding("host", "127.0.0.1", listener.getsockname()[1])
        thread.join(10)
    assert finding.severity is Severity.FAIL
    assert "is no offer" in finding.seen


def test_the_command_adds_the_peer_to_the_report() -> None:
    done = CliRunner().invoke(doctor.app, ["--backend", "host", "--peer", "0.0.0.0", "--json"])
    report = json.loads(done.output)
    assert done.exit_code == 1
    failed = [finding["check"] for finding in report["findings"] if finding["severity"] == "fail"]
    assert [check for check in failed if check.startswith("peer.")] == ["peer.address"]
