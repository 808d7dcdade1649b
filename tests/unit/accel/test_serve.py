"""The commands themselves, run as a user runs them, on a machine without accelerators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvduplex.serve_accel import _router_findings, own_address

NO_ACCELERATOR = not (Path("/dev/neuron0").exists() or Path("/dev/nvidia0").exists())


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the Unix sockets that engines make below it."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        yield Path(folder)


def kvduplex(*argv: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "COLUMNS": "200"}
    command = [sys.executable, "-m", "kvduplex", "serve", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.skipif(not NO_ACCELERATOR, reason="this host has accelerators")
@pytest.mark.parametrize(
    ("argv", "check"),
    [
        (("neuron", "--recipe", "llama-3.1-8b-trn2"), "neuron.devices"),
        (("gpu", "--recipe", "qwen3-32b-p5en", "--role", "prefill"), "gpu.driver"),
    ],
)
def test_without_the_accelerator_the_findings_come_at_once_and_nothing_starts(
    argv: tuple[str, ...], check: str, short_folder: Path
) -> None:
    result = kvduplex(*argv, home=short_folder)
    assert result.returncode == 2
    assert "nothing was started" in result.stderr
    assert check in result.stderr
    assert "To mend it" in result.stderr
    assert not list(short_folder.rglob("*.log"))


def test_without_a_recipe_the_shipped_ones_are_named(short_folder: Path) -> None:
    result = kvduplex("neuron", home=short_folder)
    assert result.returncode == 2
    assert "llama-3.1-8b-trn1" in result.stderr
    listed = kvduplex("gpu", "--list", home=short_folder)
    assert listed.returncode == 0
    assert "glm-5-fp8-p5en" in listed.stdout


def test_a_dry_run_shows_engines_and_router_on_any_machine(short_folder: Path) -> None:
    result = kvduplex("neuron", "--recipe", "gpt-oss-20b-trn3", "--dry-run", "--json", home=short_folder)
    assert result.returncode == 0, result.stderr
    units = json.loads(result.stdout)["units"]
    assert [unit["name"] for unit in units] == ["prefill-0", "decode-0", "router"]
    assert units[0]["environment"]["NEURON_VISIBLE_DEVICES"] == "0-3"
    assert "--decode" in units[2]["argv"]


def test_replicas_are_given_to_the_router_as_engines(short_folder: Path) -> None:
    result = kvduplex("neuron", "--recipe", "llama-3.1-8b-trn1", "--dry-run", "--json", home=short_folder)
    router = json.loads(result.stdout)["units"][-1]
    assert router["argv"].count("--engine") == 16
    assert "--decode" not in router["argv"]


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Silence."""


@pytest.fixture
def router() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_router_that_answers_is_accepted_and_others_are_named(router: str) -> None:
    assert list(_router_findings(router)) == []
    for url in ("http://127.0.0.1:1", f"http://{'a' * 70}.internal:8000"):
        (finding,) = _router_findings(url)
        assert url in finding.seen


@pytest.mark.parametrize("url", ["", "not a url", "ftp://127.0.0.1", "10.0.1.10:8000", "http://r:99999", "http://[::1"])
def test_what_is_no_url_of_a_router_is_refused_before_anything_is_planned(url: str, short_folder: Path) -> None:
    result = kvduplex("neuron", "--recipe", "llama-3.1-8b-trn2", "--dry-run", "--router", url, home=short_folder)
    assert result.returncode == 2
    assert result.stderr.startswith(f"kvduplex: --router: '{url}'")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--router-config", "absent.yaml"), "absent.yaml"),
        (("--router-config", "typo.yaml"), "time_outs"),
        (("--host", "a b"), "a b"),
    ],
)
def test_a_router_that_could_not_start_is_refused_before_engines_compile(
    flags: tuple[str, ...], message: str, short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text("time_outs: {}\n")
    result = kvduplex("neuron", "--recipe", "llama-3.1-8b-trn2", "--dry-run", *flags, home=short_folder)
    assert result.returncode == 2
    assert "the router's configuration: " in result.stderr
    assert message in result.stderr


def test_the_own_address_is_an_address() -> None:
    assert own_address().count(".") == 3
