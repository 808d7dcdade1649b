"""`kvduplex bench transfer` over real NIXL agents on loopback, and what it says when it cannot measure."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from kvduplex_bench.app import app
from kvduplex_bench.errors import BenchError
from kvduplex_bench.transfer_peer import Offer, fetch_offer, pattern
from kvduplex_bench.transfer_run import Case, Measured

OFFER = Offer(
    version=1, backend="host", metadata="", direct="", address=4096, length=1 << 20, device_id=0, seed=1
)  # fmt: skip


def bench(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["transfer", *arguments])
    return done.exit_code, done.output


@contextmanager
def answering(line: bytes) -> Iterator[int]:
    """A server that answers one connection with `line`."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(line)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


@contextmanager
def listening(*arguments: str) -> Iterator[int]:
    """`kvduplex bench transfer --listen` on a free port; ended as a person would, by Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "kvduplex", "bench", "transfer", "--listen", f"127.0.0.1:{port}", *arguments]
    # A shell's background jobs ignore Ctrl-C, and so would the programs that their tests start.
    process = subprocess.Popen(["env", "--default-signal=INT", *argv], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert any("Offering" in line for line in process.stdout)
        yield port
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_reads_over_loopback_through_both_arms() -> None:
    code, output = bench("--blocks", "1,33", "--block-bytes", "4096", "--repeats", "2", "--json")
    assert code == 0, output
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [(line["blocks"], line["block_bytes"]) for line in lines] == [(1, 4096), (33, 4096)]
    assert all(len(line[arm]) == 2 and min(line[arm]) > 0 for line in lines for arm in ("interface_s", "direct_s"))


def test_a_peer_that_listens_is_read_from_and_ends_at_ctrl_c() -> None:
    with listening("--bytes", "65536") as port:
        code, output = bench("--peer", f"127.0.0.1:{port}", "--blocks", "16", "--block-bytes", "4096", "--repeats", "1")
        assert code == 0, output
        assert "NIXL alone" in output
        code, output = bench("--peer", f"127.0.0.1:{port}", "--blocks", "17", "--block-bytes", "4096")
        assert code == 1
        assert "start it with --bytes 69632" in " ".join(output.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "answers something that is no offer"),
        (b"", "answers something that is no offer"),
        (json.dumps(asdict(OFFER) | {"length": "many"}).encode() + b"\n", "answers something that is no offer"),
        (json.dumps(asdict(replace(OFFER, version=2))).encode() + b"\n", "speaks version 2"),
    ],
)
def test_another_program_at_the_port(line: bytes, message: str) -> None:
    with answering(line) as port, pytest.raises(BenchError, match=message):
        fetch_offer("127.0.0.1", port, timeout_s=5)


def test_nobody_at_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(BenchError, match="start `kvduplex bench transfer --listen"):
        fetch_offer("127.0.0.1", port, timeout_s=5)


def test_a_peer_of_another_backend() -> None:
    with answering(json.dumps(asdict(replace(OFFER, backend="neuron"))).encode() + b"\n") as port:
        code, output = bench("--peer", f"127.0.0.1:{port}", "--blocks", "1")
    assert code == 1
    assert "the peer offers backend neuron, not host" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "tpu"), "--backend tpu: unknown; installed are"),
        (("--blocks", "1,x"), "--blocks 1,x: write numbers"),
        (("--blocks", "0"), "each must be at least 1"),
        (("--peer", "host:http"), "'http' is no port"),
        (("--listen", "127.0.0.1:-1"), "127.0.0.1:-1: '-1' is no port"),  # to rich, `:-1:` is a picture
        (("--peer", "a..b"), "no transfer peer at a..b:5990"),
        (("--peer", ":5990"), "there is no address before the port"),
        (("--listen", ":5990"), "there is no address before the port"),
        (("--listen", "127.0.0.1", "--peer", "127.0.0.1"), "do not go together"),
        (("--listen", "192.0.2.1:5990", "--bytes", "4096"), "give an address of this host"),
        (("--listen", "a..b:5990", "--bytes", "4096"), "give an address of this host"),
        (("--listen", "127.0.0.1:5989", "--bytes", str(1 << 60)), "ask for fewer or smaller blocks"),
    ],
)
def test_settings_that_cannot_be(arguments: tuple[str, ...], message: str) -> None:
    code, output = bench(*arguments)
    assert code == 1
    assert message in " ".join(output.split())


def test_an_offer_that_this_host_could_not_compare_is_refused() -> None:
    with answering(json.dumps(asdict(replace(OFFER, length=1 << 60))).encode()) as port:
        code, output = bench("--peer", f"127.0.0.1:{port}", "--blocks", "1")
    assert code == 1
    assert "ask for fewer or smaller blocks" in " ".join(output.split())


def test_an_accelerator_that_is_not_here() -> None:
    code, output = bench("--backend", "neuron", "--blocks", "1")
    assert code == 1
    assert "the peer process ended with status 1" in " ".join(output.split())


def test_share_and_overhead_compare_medians() -> None:
    measured = Measured(Case(1000, 4), interface=(0.5, 0.2, 0.4), direct=(0.1, 0.2, 0.3))
    assert (measured.rate, measured.direct_rate) == (10000, 20000)
    assert measured.share == pytest.approx(0.5)
    assert measured.overhead_s == pytest.approx(0.2)


def test_samples_are_the_ends_and_the_middle() -> None:
    assert Case(1, 9).samples == [0, 4, 8]
    assert Case(1, 1).samples == [0]


def test_the_bytes_of_a_buffer_are_known_from_its_seed() -> None:
    assert (pattern(3, 64) == pattern(3, 64)).all()
    assert (pattern(3, 64) != pattern(4, 64)).any()


def measuring(*arguments: str) -> subprocess.Popen[str]:
    """A measurement far longer than a test, in a process group as a shell makes one; it has reported one size."""
    argv = ["bench", "transfer", "--blocks", "1," + ",".join(["64"] * 1000), "--block-bytes", "4096", "--json"]
    command = ["env", "--default-signal=INT", sys.executable, "-m", "kvduplex", *argv, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("{"), process.communicate()[1]
    return process


def test_a_peer_that_dies_while_it_is_read_is_told_and_not_a_traceback() -> None:
    argv = [sys.executable, "-m", "kvduplex_bench.transfer_peer", "host", "1048576", "7"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        port = next(line.strip() for line in peer.stdout if line.strip().isdigit())
        process = measuring("--peer", f"127.0.0.1:{port}", "--repeats", "2000")
        peer.kill()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "\nbench transfer: " in said
    assert "Traceback" not in said


def test_ctrl_c_ends_both_sides_of_a_loopback_without_a_traceback() -> None:
    process = measuring("--repeats", "2000")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in said
