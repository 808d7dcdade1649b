"""KV-sized blocks between the memories of two processes, for every device of this host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from kvduplex_transfer.interface import Severity

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(900)]

_BYTES = 64 << 20
_START_S = 120
_COMMAND = (sys.executable, "-m", "kvduplex", "bench", "transfer")


@contextmanager
def listening(backend: str, environment: Mapping[str, str]) -> Iterator[int]:
    """A process that offers `_BYTES` of its device to whoever reads."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [*_COMMAND, "--backend", backend, "--listen", f"127.0.0.1:{port}", "--bytes", str(_BYTES)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        assert process.stdout is not None
        try:
            assert any("Offering" in line for line in process.stdout), "the peer did not start; its messages are above"
            yield port
        finally:
            process.terminate()


def read_from(port: int, backend: str, environment: Mapping[str, str], block_bytes: int) -> list[dict[str, Any]]:
    """Read and compare bytes in a second process."""
    argv = [*_COMMAND, "--backend", backend, "--peer", f"127.0.0.1:{port}", "--json", "--repeats", "3"]
    argv += ["--block-bytes", str(block_bytes), "--blocks", f"1,64,{_BYTES // block_bytes}"]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=_START_S, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_doctor_has_nothing_to_mend(accelerator: Any) -> None:
    failures = [finding for finding in accelerator.report.findings if finding.severity is Severity.FAIL]
    assert not failures


def test_every_device_reads_from_its_neighbour(accelerator: Any) -> None:
    """Bytes are compared by the reader; each device is once the source and once the target."""
    devices = accelerator.devices()
    for index, source in enumerate(devices):
        with listening(accelerator.backend, source) as port:
            target = devices[(index + 1) % len(devices)]
            found = read_from(port, accelerator.backend, target if target != source else {}, 64 << 10)
        assert [one["blocks"] for one in found] == [1, 64, 1024], (source, target)


@pytest.mark.parametrize("block_bytes", [4 << 10, 16 << 10, 1 << 20])
def test_block_sizes_of_other_models(accelerator: Any, block_bytes: int) -> None:
    with listening(accelerator.backend, {}) as port:
        found = read_from(port, accelerator.backend, {}, block_bytes)
    assert found[-1]["blocks"] * block_bytes == _BYTES
