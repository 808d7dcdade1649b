"""The command line itself: quick to answer, and clear when something is missing or wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvduplex import __version__
from kvduplex.app import main
from kvduplex.doctor import choose_backend, load_backend
from kvduplex.errors import PreflightError, UsageError
from kvduplex.folders import Folders, private_folder
from kvduplex_transfer.hostview import FixtureHost

# Importing any of these would make every command slow, or fail without an extra.
HEAVY = {
    "vllm",
    "torch",
    "transformers",
    "nixl",
    "numpy",
    "pydantic",
    "fastapi",
    "uvicorn",
    "psutil",
    "yaml",
    "rich.live",
}


def kvduplex(*arguments: str, short_folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    folders = {name: str(short_folder / name) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")}
    return subprocess.run(
        [sys.executable, "-m", "kvduplex", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **folders, "COLUMNS": "200", "NO_COLOR": "1", **environment},
    )


def test_help_imports_nothing_heavy(short_folder: Path) -> None:
    script = f"""
import sys
sys.argv = ["kvduplex", "--help"]
from kvduplex.app import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
print("heavy:", sorted({HEAVY!r} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "heavy: []" in result.stdout
    for command in ("serve", "router", "doctor", "bench", "model", "version"):
        assert f" {command} " in result.stdout


def test_dry_run_starts_nothing_imports_no_engine_and_makes_no_file(short_folder: Path) -> None:
    script = """
import sys
sys.argv = ["kvduplex", "serve", "cpu", "--dry-run", "--json"]
from kvduplex.app import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None)
print(sorted({"vllm", "torch", "nixl", "transformers"} & set(sys.modules)))
"""
    folders = {name: str(short_folder / name) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")}
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, **folders},
    )  # fmt: skip
    plan, imported = result.stdout.splitlines()
    assert [unit["name"] for unit in json.loads(plan)["units"]] == ["prefill-0", "decode-0", "router"]
    assert imported == "[]"
    assert list(short_folder.iterdir()) == []


def test_version_is_printed_both_ways(short_folder: Path) -> None:
    assert kvduplex("--version", short_folder=short_folder).stdout == f"kvduplex {__version__}\n"
    assert f"python       {sys.version.split()[0]}" in kvduplex("version", short_folder=short_folder).stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "cpu", "--model", "/no/such/model"], "--model /no/such/model: no such folder"),
        (["serve", "cpu", "--kv-space", "100000"], "GiB for 2 engines"),
        (["serve", "cpu", "--set", "nonsense"], "--set nonsense: write KEY=VALUE"),
        (["serve", "cpu", "--port", "8100"], "port 8100 is wanted by prefill-0 (http) and router (http)"),
        (["serve", "cpu", "--prefill", "0"], "--prefill"),
        (["model", "make", "--size", "huge"], "--size huge: unknown; choose one of tiny, 20m, 85m"),
        (["doctor", "--backend", "abacus"], "--backend abacus: unknown; installed are"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str],
    expected: str,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvduplex", *arguments])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    told = capsys.readouterr()
    assert expected in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_the_router_refuses_what_it_cannot_use(short_folder: Path) -> None:
    result = kvduplex("router", "--prefill", "nonsense", short_folder=short_folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert "'nonsense' is not a URL" in result.stderr


def test_a_missing_extra_is_named(short_folder: Path) -> None:
    blocked = short_folder / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text("import sys; sys.modules['uvicorn'] = None\n")
    result = kvduplex("router", "--help", short_folder=short_folder, PYTHONPATH=str(blocked))
    assert result.returncode == 2
    assert result.stderr == (
        "kvduplex: this command needs the package uvicorn, which is not installed: pip install 'kvduplex[router]'\n"
    )


def test_router_and_bench_show_their_own_help(short_folder: Path) -> None:
    pytest.importorskip("uvicorn")
    assert "--decode URL[#PART=HOST:PORT&...]" in kvduplex("router", "--help", short_folder=short_folder).stdout
    assert "smoke" in kvduplex("bench", "--help", short_folder=short_folder).stdout


class TestDoctor:
    """Renders what a backend found."""

    def test_report_as_json_has_every_finding_and_sets_the_exit_code(self, short_folder: Path) -> None:
        result = kvduplex("doctor", "--backend", "host", "--json", short_folder=short_folder)
        report = json.loads(result.stdout)
        assert report["backend"] == "host"
        assert {"check", "severity", "seen", "expected", "why", "fix"} <= set(report["findings"][0])
        assert result.returncode == (1 if report["severity"] == "fail" else 0)

    def test_report_as_text_counts_its_findings(self, short_folder: Path) -> None:
        result = kvduplex("doctor", "--backend", "host", short_folder=short_folder)
        assert "✓ python.version:" in result.stdout
        assert result.stdout.splitlines()[-1].startswith("host: ")

    def test_the_backend_is_that_of_the_devices_that_are_there(self, short_folder: Path) -> None:
        assert choose_backend(FixtureHost(short_folder)) == "host"

    def test_an_unknown_backend_is_refused(self) -> None:
        with pytest.raises(UsageError, match="installed are"):
            load_backend("abacus")


class TestFolders:
    """The XDG specification, and a runtime folder that nobody else can write to."""

    def test_defaults(self) -> None:
        folders = Folders.from_environ({"XDG_CACHE_HOME": "", "XDG_STATE_HOME": "relative"}, home=Path("/h"), uid=7)
        runtime = Path("/tmp/kvduplex-7")  # noqa: S108 - only compared
        assert folders == Folders(
            cache=Path("/h/.cache/kvduplex"), state=Path("/h/.local/state/kvduplex"), runtime=runtime
        )

    def test_the_environment_decides(self) -> None:
        environ = {"XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r"}
        folders = Folders.from_environ(environ, home=Path("/h"), uid=7)
        assert folders == Folders(cache=Path("/c/kvduplex"), state=Path("/s/kvduplex"), runtime=Path("/r/kvduplex"))

    def test_a_folder_others_can_write_to_is_refused(self, short_folder: Path) -> None:
        (short_folder / "run").mkdir()
        (short_folder / "run").chmod(0o777)
        with pytest.raises(PreflightError, match="only you can write to; it is drwxrwxrwx"):
            private_folder(short_folder / "run")

    def test_a_link_is_refused(self, short_folder: Path) -> None:
        (short_folder / "target").mkdir()
        (short_folder / "run").symlink_to(short_folder / "target")
        with pytest.raises(PreflightError, match="only you can write to"):
            private_folder(short_folder / "run")


def test_a_terminal_without_unicode_gets_the_report_all_the_same(short_folder: Path) -> None:
    result = kvduplex("doctor", "--backend", "gpu", short_folder=short_folder, PYTHONIOENCODING="ascii")
    assert "Traceback" not in result.stderr
    assert "gpu: " in result.stdout.splitlines()[-1]
