"""A router as its container runs it: the Dockerfile's entry point, configured by one environment variable."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKERFILE = Path(__file__).parents[3] / "router" / "Dockerfile"
DEADLINE_S = 60.0


def instructions(name: str) -> list[str]:
    """Arguments of the Dockerfile's instructions of that name."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{name} ")]


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def engines() -> Iterator[list[str]]:
    """Two engines that answer their health check."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def test_the_entry_point_serves_shows_its_log_and_ends_when_told(tmp_path: Path, engines: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (tmp_path / "keys").write_text("alice secret-key\n")
    node = {
        "cluster": "demo",
        "role": "router",
        "router": {"bind_host": "0.0.0.0", "port": port},
        "discovery": {"prefill": engines[:1], "decode": engines[1:]},
        "keys": {"clients": {"file": str(tmp_path / "keys")}},
        "logging": {"relay": True, "folder": str(tmp_path / "log")},
        "drain": {"timeout_s": 5},
    }
    program, *arguments = json.loads(instructions("ENTRYPOINT")[0])
    environment = {
        "PATH": os.environ["PATH"],
        "KVDUPLEX_NODE": yaml.safe_dump(node),
        "RUNTIME_DIRECTORY": str(tmp_path / "run"),
    }
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + DEADLINE_S
        while status(port, "/ready") != 200:
            assert process.poll() is None, out.read_text()
            assert time.monotonic() < end, out.read_text()
            time.sleep(0.05)
        assert status(port, "/v1/models") == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
    said = out.read_text()
    assert "router on http://" in said
    assert said.count("router on http://") == 1
    assert "secret-key" not in said


def test_the_container_is_built_from_pinned_parts_and_runs_without_root() -> None:
    assert instructions("ARG") == ["PYTHON_IMAGE"]
    assert instructions("FROM") == ["${PYTHON_IMAGE}"]
    assert instructions("USER") == ["10001:10001"]
    installed = [part for line in instructions("RUN") for part in line.split("&&") if "pip install" in part]
    assert len(installed) == 2
    assert "--require-hashes -r /build/requirements.txt" in installed[0]
    assert all("--no-deps" in part for part in installed)
    assert {"/run/kvduplex", "/var/log/kvduplex", "/tmp"} == set(json.loads(instructions("VOLUME")[0]))  # noqa: S108
