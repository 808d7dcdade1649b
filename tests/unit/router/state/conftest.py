"""A real Valkey or Redis server for the tests of shared conversations."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DEADLINE_S = 20.0


class Server:
    """A server on a port of its own that keeps nothing on disk."""

    def __init__(self, binary: str, folder: Path, *more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._command = [
            binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(folder), "--logfile", str(folder / "server.log"), *more,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.tls_port = 0

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)
        end = time.monotonic() + DEADLINE_S
        while True:
            assert self._process.poll() is None, "the server did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as talk:
                talk.sendall(b"PING\r\n")
                if talk.recv(16).startswith(b"+PONG"):
                    return
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """One inline command's answer, as the protocol spells it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S) as talk:
            talk.sendall(" ".join(words).encode() + b"\r\n")
            talk.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: talk.recv(65536), b""))


def program() -> str:
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        missing = "no valkey-server and no redis-server here; install one (Debian: apt-get install redis-server)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    return binary or ""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(program(), tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[Server]:
    """A server that speaks TLS as well, at a port of its own, with the certificate ``cert.pem`` of its folder."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=state"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    made = Server(program(), tmp_path, "--tls-port", str(port), "--tls-auth-clients", "no", *files)
    made.tls_port = port
    made.start()
    yield made
    made.stop()
