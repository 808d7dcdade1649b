"""The life of a whole cluster through the command line that users type: ready, used, stopped, broken, all gone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvduplex.announce import curl_example
from kvduplex_bench.cluster import free_ports
from kvduplex_bench.scrape import scrape

pytestmark = pytest.mark.engine

READY_WITHIN_S = 300
STOP_WITHIN_S = 10
MEMORY_GIB = 10
OFFSET = 2000
"""Engine ports of these tests lie apart from those of other tests."""


class Serve:
    """A ``kvduplex serve cpu`` started by a test, and everything it starts."""

    def __init__(self, port: int, runtime: Path, logs: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvduplex", "serve", "cpu", "--json", "--port", str(port)]
        command += ["--port-offset", str(OFFSET), "--logs", str(logs), *arguments]
        self.runtime = runtime
        self.errors = logs.parent / "stderr.txt"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
                start_new_session=True,
            )
        self.family: list[psutil.Process] = []

    def ready(self) -> dict[str, Any]:
        """The readiness line; from here on `family` holds every process of the cluster."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(READY_WITHIN_S), f"not ready: {self.errors.read_text()}"
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Exit code, and seconds it took."""
        began = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(timeout=2 * STOP_WITHIN_S), time.monotonic() - began

    def resident_gib(self) -> float:
        everybody = [psutil.Process(self.process.pid), *self.family]
        return sum(process.memory_info().rss for process in everybody) / (1 << 30)

    def assert_nothing_left(self, ports: list[int]) -> None:
        gone, alive = psutil.wait_procs(self.family, timeout=STOP_WITHIN_S)
        assert alive == []
        assert len(gone) == len(self.family)
        # Lock files of a killed supervisor stay, released; there is nothing else.
        assert [path.name for path in self.runtime.rglob("*") if path.suffix != ".lock"] == ["kvduplex"]
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))


def ports_of(ready: dict[str, Any]) -> list[int]:
    return [port for unit in (ready["router"], *ready["engines"]) for port in unit["ports"].values()]


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}  # noqa: S108 - only looked at


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def serve(port: int, tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Starts clusters at the same ports, one after the other; none outlives its test."""
    started: list[Serve] = []
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="kvd-") as runtime:

        def start(*arguments: str) -> Serve:
            started.append(Serve(port, Path(runtime), tmp_path / "logs", *arguments))
            return started[-1]

        yield start
        for one in started:
            with contextlib.suppress(subprocess.TimeoutExpired), one.process:
                one.process.terminate()
                one.process.wait(timeout=2 * STOP_WITHIN_S)
    assert shared_memory() <= before


def test_a_cluster_serves_fits_refuses_a_double_and_stops_in_time(serve: Callable[..., Serve]) -> None:
    cluster = serve("--no-prefill-prefix-cache")
    ready = cluster.ready()
    assert ready["seconds"] < READY_WITHIN_S

    answers = run_shell(curl_example(ready["url"], ready["model"]))
    assert [json.loads(answer)["role"] for answer in answers] == ["assistant", "assistant"]
    assert len({json.loads(answer)["content"] for answer in answers}) == 2
    prefill = next(engine["url"] for engine in ready["engines"] if engine["role"] == "prefill")
    assert scrape(prefill).total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") > 0
    assert cluster.resident_gib() < MEMORY_GIB

    double = subprocess.run(
        [sys.executable, "-m", "kvduplex", "serve", "cpu", "--port", str(ports_of(ready)[0]), "--port-offset", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(cluster.runtime / "other")},
    )
    assert double.returncode == 2
    assert re.search(rf"127\.0\.0\.1:{ports_of(ready)[0]} \(router, http\) is held by process \d+ \(", double.stderr)
    (cluster.runtime / "other" / "kvduplex").rmdir()
    (cluster.runtime / "other").rmdir()

    code, seconds = cluster.stop()
    assert code == 0, cluster.errors.read_text()
    assert seconds < STOP_WITHIN_S
    cluster.assert_nothing_left(ports_of(ready))


@pytest.mark.parametrize("victim", ["decode-0", "router"])
def test_a_program_that_is_killed_later_ends_the_cluster_with_its_name(
    serve: Callable[..., Serve], victim: str
) -> None:
    cluster = serve()
    ready = cluster.ready()
    pid = next(unit["pid"] for unit in (ready["router"], *ready["engines"]) if unit["name"] == victim)
    below = psutil.Process(pid).children(recursive=True)
    # Of an engine, what computes is killed, which is not the process that is supervised.
    max(below, key=lambda each: each.memory_info().rss, default=psutil.Process(pid)).kill()
    assert cluster.process.wait(timeout=60) == 1
    message = cluster.errors.read_text()
    assert re.search(rf"kvduplex: {victim} (was killed by SIGKILL|ended with exit code \d+)", message)
    assert f"Last lines of {cluster.errors.parent}/logs/{victim}.log:" in message
    cluster.assert_nothing_left(ports_of(ready))


def test_an_engine_that_dies_while_loading_is_explained_and_nothing_stays(serve: Callable[..., Serve]) -> None:
    cluster = serve("--max-model-len", "1000000000")
    assert cluster.process.wait(timeout=READY_WITHIN_S) == 1
    message = cluster.errors.read_text()
    assert re.search(r"kvduplex: (prefill|decode)-0 ended with exit code \d+ while ", message)
    assert "Its log names: " in message
    assert "max_model_len" in message


def test_a_supervisor_that_is_killed_takes_its_engines_along(serve: Callable[..., Serve]) -> None:
    cluster = serve()
    ready = cluster.ready()
    code, _ = cluster.stop(signal.SIGKILL)
    assert code == -signal.SIGKILL
    cluster.assert_nothing_left(ports_of(ready))


def run_shell(script: str) -> list[str]:
    result = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=120, check=True)
    return result.stdout.splitlines()


def test_requests_after_a_stop_are_refused_by_nobody_else(port: int) -> None:
    """The port of the router is free again, so nothing answers there."""
    with pytest.raises(OSError, match=r"refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
