"""The rights that the state stack gives the routers' user are those that the router's store needs, and no more."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkey import Valkey
from valkey.exceptions import NoPermissionError

from kvduplex_infra.names import STATE_USER
from kvduplex_router.config import StateConfig
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.conversations.valkey import ValkeyStore

pytest.importorskip("aws_cdk", reason="make setup-infra brings the CDK")

from kvduplex_infra.stacks.state import ACCESS

pytestmark = pytest.mark.infra
PASSWORD = "p" * 64
DEADLINE_S = 20.0


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A server whose only user has the stack's rights."""
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        missing = "no valkey-server and no redis-server here; install one (Debian: apt-get install redis-server)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen = int(probe.getsockname()[1])
    command = [
        binary, "--port", str(chosen), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path),
        "--logfile", str(tmp_path / "log"), "--user", STATE_USER, *ACCESS.split(), f">{PASSWORD}",
        "--user", "default", "off",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + DEADLINE_S
        while True:
            assert process.poll() is None, "the server did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", chosen), timeout=1):
                break
            assert time.monotonic() < end, "the server does not listen"
            time.sleep(0.01)
        yield chosen
    finally:
        process.kill()
        process.wait(DEADLINE_S)


async def test_routers_can_do_with_it_what_they_do(port: int) -> None:
    config = StateConfig(url=f"valkey://{STATE_USER}@127.0.0.1:{port}", namespace="demo", timeout_s=5)
    store = ValkeyStore(config, password=PASSWORD, max_age_s=60, renew_every_s=0)
    try:
        await store.ping()
        reference = Reference(engine="http://d:8200", lease="lease-1", stored_at=0.0)
        assert await store.put(b"key", reference, keep_s=30) is None
        due = await store.due(10)
        assert [name.lease for name in due.leases] == ["lease-1"]
        await store.lost(due.leases)
        found = await store.take([b"other", b"key"])
        assert found is not None
        assert (found.reference.lease, found.lost) == ("lease-1", True)
        assert await store.take([b"key"]) is None
    finally:
        await store.close()


@pytest.mark.parametrize(
    "command",
    [("CONFIG", "GET", "*"), ("FLUSHALL",), ("KEYS", "*"), ("ACL", "LIST"), ("GET", "other:key"), ("SHUTDOWN",)],
    ids=" ".join,
)
def test_an_intruder_with_it_can_do_little(port: int, command: tuple[str, ...]) -> None:
    with (
        Valkey(port=port, username=STATE_USER, password=PASSWORD, socket_timeout=DEADLINE_S) as client,
        pytest.raises(NoPermissionError),
    ):
        client.execute_command(*command)
