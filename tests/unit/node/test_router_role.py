"""A machine's router, as its unit runs it: the real router process over engines that answer their health check."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from kvduplex.node.discovery import Engines
from kvduplex.node.document import parse_node
from kvduplex.node.errors import DiscoveryError
from kvduplex.node.machine import Machine
from kvduplex.node.manifest import ImageManifest
from kvduplex.node.metadata import InstanceMetadata
from kvduplex.node.notify import Notifier
from kvduplex.node.run_router import _next_engines, _route, _write_client_keys, router_environment

SHARES = "kvduplex_router_state_up 1.0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def engine(port: int) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port)


def machine_of(folder: Path, notify: str | None, **changes: Any) -> Machine:
    keys = folder / "client.keys"
    keys.write_text("alice secret-key\n")
    values: dict[str, Any] = {
        "cluster": "demo",
        "role": "router",
        "logging": {"folder": str(folder / "logs")},
        "keys": {"clients": {"file": str(keys)}},
        "drain": {"timeout_s": 2},
    }
    said: list[str] = []
    return Machine(
        config=parse_node(values | changes, where="x"),
        manifest=ImageManifest(flavour="cpu", version="0.1.0", engine_python="python"),
        environ={"PATH": "/usr/bin:/bin"},
        metadata=InstanceMetadata("http://127.0.0.1:1", timeout_s=0.1),
        aws=lambda: pytest.fail("AWS is not needed"),
        notifier=Notifier(notify),
        runtime=folder / "run",
        cache=folder / "cache",
        report=said.append,
    )


def status_of(port: int, path: str, key: str | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


async def test_a_router_becomes_ready_over_its_engines_asks_for_keys_and_ends(tmp_path: Path) -> None:
    prefill, decode, port = free_port(), free_port(), free_port()
    servers = [await engine(prefill), await engine(decode)]
    notify = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(notify))
        systemd.setblocking(False)
        machine = machine_of(
            tmp_path,
            str(notify),
            router={"port": port},
            discovery={"prefill": [f"http://127.0.0.1:{prefill}"], "decode": [f"http://127.0.0.1:{decode}"]},
        )
        keys = _write_client_keys(machine)
        running = asyncio.create_task(_route(machine, keys, machine.environ))
        said = ""
        async with asyncio.timeout(60):
            while "READY=1" not in said:
                said = (await asyncio.get_running_loop().sock_recv(systemd, 4096)).decode()
    assert await asyncio.to_thread(status_of, port, "/v1/models") == 401
    async with asyncio.timeout(20):
        while await asyncio.to_thread(status_of, port, "/ready", "secret-key") != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(running, 20)
    for server in servers:
        server.close()
        await server.wait_closed()
    assert keys is not None
    assert "secret-key" not in keys.read_text()
    assert keys.stat().st_mode & 0o777 == 0o600


def text_of(port: int, path: str, key: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def files_below(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()}


async def until_served(machine: Machine, notify: socket.socket) -> asyncio.Task[None]:
    """Run the machine's router as its unit does, until systemd is told that it serves."""
    environment = router_environment(machine)
    running = asyncio.create_task(_route(machine, _write_client_keys(machine), environment))
    said = ""
    async with asyncio.timeout(60):
        while "READY=1" not in said:
            said = (await asyncio.get_running_loop().sock_recv(notify, 4096)).decode()
    return running


async def test_routers_share_a_store_with_tls_and_its_password_lies_in_no_file(tmp_path: Path, tls_store: Any) -> None:
    prefill, decode, port = free_port(), free_port(), free_port()
    servers = [await engine(prefill), await engine(decode)]
    secret = tmp_path / "store.password"
    secret.write_text("a-secret-of-the-store\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        machine = machine_of(
            tmp_path,
            str(tmp_path / "notify"),
            router={"port": port, "options": {"state": {"ca_file": str(tls_store.ca), "timeout_s": 5}}},
            discovery={"prefill": [f"http://127.0.0.1:{prefill}"], "decode": [f"http://127.0.0.1:{decode}"]},
            state={"url": tls_store.url, "password": {"file": str(secret)}},
        )
        running = await until_served(machine, systemd)
    async with asyncio.timeout(20):
        while SHARES not in await asyncio.to_thread(text_of, port, "/metrics", "secret-key"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(running, 20)
    for server in servers:
        server.close()
        await server.wait_closed()
    written = files_below(tmp_path)
    assert written.pop(secret)
    assert "namespace: demo" in written[tmp_path / "run" / "router.yaml"]
    assert not [path for path, text in written.items() if "a-secret-of-the-store" in text]


async def test_a_failed_lookup_leaves_the_engines_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_of(tmp_path, None, discovery={"ec2_tags": {"a": "b"}, "refresh_s": 5})
    stop, looks = asyncio.Event(), 0

    def lookup(*_: object, **__: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            stop.set()
        raise DiscoveryError("throttled.")

    async def no_wait(*_: object) -> None:
        return None

    monkeypatch.setattr("kvduplex.node.run_router._known_engines", lookup)
    monkeypatch.setattr("kvduplex.node.run_router._wait", no_wait)
    assert await _next_engines(machine, Engines(("http://p:1",), ("http://d:1",)), stop) is None
    assert looks == 2
