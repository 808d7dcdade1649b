"""A store of conversations as a cluster has it: with TLS, and with a user of few rights."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE_S = 20.0
USER, PASSWORD = "kvduplex-router", "a-secret-of-the-store"
RIGHTS = "on ~kvduplex:* &kvduplex:* -@all +@read +@write +@keyspace +@scripting +@connection +time -@dangerous"


@dataclass(frozen=True)
class TlsStore:
    """A running server.

    Attributes:
        port: Where it listens on 127.0.0.1, with TLS alone.
        ca: What its certificate is checked against.
    """

    port: int
    ca: Path

    @property
    def url(self) -> str:
        return f"valkeys://{USER}@127.0.0.1:{self.port}"


def _certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    name = ["-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *kind, *name, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return cert, key


@pytest.fixture
def tls_store(tmp_path: Path) -> Iterator[TlsStore]:
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None or shutil.which("openssl") is None:
        missing = "needs openssl and a valkey-server or redis-server (Debian: apt-get install openssl redis-server)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    folder = tmp_path / "store"
    folder.mkdir()
    cert, key = _certificate(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        binary, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder),
        "--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-auth-clients", "no",
        "--logfile", str(folder / "log"), "--user", USER, *RIGHTS.split(), f">{PASSWORD}", "--user", "default", "off",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        _wait_until_it_listens(process, port, cert)
        yield TlsStore(port, cert)
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int, ca: Path) -> None:
    context = ssl.create_default_context(cafile=str(ca))
    end = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None, "the store did not start"
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1"),
        ):
            return
        assert time.monotonic() < end, "the store does not listen"
        time.sleep(0.01)
