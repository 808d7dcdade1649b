"""TLS to engines: checked against a configured authority, with the router's own certificate when asked for one."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvduplex_router.config import TlsConfig
from kvduplex_router.errors import ConfigError
from kvduplex_router.fleet.tls import client_context
from kvduplex_router.http.errors import ConnectError
from kvduplex_router.http.pool import Origin, Pool, Timeouts
from kvduplex_router.http.request import get_request
from kvduplex_router.http.watchdog import Watchdog


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    name = ["-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *kind, *name, "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return cert, key


@contextlib.asynccontextmanager
async def engine(cert: Path, key: Path, *, asks_for_certificate: bool) -> AsyncIterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if asks_for_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cert)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def ask(port: int, config: TlsConfig) -> bytes:
    watchdog = Watchdog()
    origin = Origin.parse(f"https://127.0.0.1:{port}")
    pool = Pool(origin, timeouts=Timeouts(first_byte_s=5), watchdog=watchdog, tls=client_context(config))
    try:
        async with asyncio.timeout(10):
            response = await pool.send(get_request(origin, "/"))
            return await response.read_all(100)
    finally:
        pool.close()
        watchdog.close()


async def test_an_engine_is_checked_against_the_configured_authority(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    async with engine(cert, key, asks_for_certificate=False) as port:
        assert await ask(port, TlsConfig(ca_file=cert)) == b"hi"
        with pytest.raises(ConnectError):
            await ask(port, TlsConfig())


async def test_the_router_shows_its_own_certificate(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    async with engine(cert, key, asks_for_certificate=True) as port:
        assert await ask(port, TlsConfig(ca_file=cert, cert_file=cert, key_file=key)) == b"hi"


def test_missing_files_are_named(tmp_path: Path) -> None:
    missing: Any = tmp_path / "none.pem"
    with pytest.raises(ConfigError, match=r"tls: cannot load .*none.pem"):
        client_context(TlsConfig(ca_file=missing))
