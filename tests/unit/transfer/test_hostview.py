"""The view of a machine: the real one, and a folder that stands for one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvduplex_transfer.hostview import FixtureHost, LocalHost, command_slug


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    (tmp_path / "sys/devices/efa0").mkdir(parents=True)
    (tmp_path / "sys/devices/efa0/state").write_text("ACTIVE\n")
    (tmp_path / "sys/class/infiniband/efa0").symlink_to("../../devices/efa0")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text("ID=debian\n")
    (tmp_path / ".commands").mkdir()
    return tmp_path


def test_files_are_read_below_the_root(tree: Path) -> None:
    host = FixtureHost(tree)

    assert host.read_text("/etc/os-release") == "ID=debian\n"
    assert host.read_text("/sys/class/infiniband/efa0/state") == "ACTIVE\n"
    assert host.read_text("/etc/absent") is None
    assert host.read_text("/etc") is None


def test_patterns_are_answered_as_the_host_would(tree: Path) -> None:
    host = FixtureHost(tree)

    assert host.glob("/sys/class/infiniband/*") == ["/sys/class/infiniband/efa0"]
    assert host.glob("/sys/class/infiniband/*/state") == ["/sys/class/infiniband/efa0/state"]
    assert host.glob("/nothing/*") == []


def test_absolute_links_stay_inside_the_tree(tree: Path) -> None:
    (tree / "etc/release").symlink_to("/etc/os-release")

    assert FixtureHost(tree).read_text("/etc/release") == "ID=debian\n"


def test_nothing_outside_the_tree_is_read(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    (tree / "etc/way-out").symlink_to(os.path.relpath(secret, tree / "etc"))

    host = FixtureHost(tree)

    assert host.read_text("/etc/way-out") is None
    assert host.read_text("/etc/../../" + secret.name) is None
    assert host.glob("/etc/way-*") == []


def test_bytes_that_are_no_text_and_long_files_do_no_harm(tree: Path) -> None:
    (tree / "etc/binary").write_bytes(b"\xff\x00ok")
    (tree / "etc/huge").write_bytes(b"x" * (3 << 20))

    host = FixtureHost(tree)

    assert host.read_text("/etc/binary") == "\ufffd\x00ok"
    assert len(host.read_text("/etc/huge") or "") == 1 << 20


def test_recorded_commands_are_answered(tree: Path) -> None:
    commands = tree / ".commands"
    (commands / "neuron-ls_-j").write_text("[]\n")
    (commands / "fi_info_-p_efa").write_text("")
    (commands / "fi_info_-p_efa.rc").write_text("61\n")
    (commands / "fi_info_-p_efa.stderr").write_text("fi_getinfo: -61\n")
    host = FixtureHost(tree)

    healthy, broken, absent = (
        host.run(["neuron-ls", "-j"]),
        host.run(["fi_info", "-p", "efa"]),
        host.run(["nvidia-smi"]),
    )

    assert (healthy.returncode, healthy.stdout, healthy.stderr) == (0, "[]\n", "")
    assert (broken.returncode, broken.stderr) == (61, "fi_getinfo: -61\n")
    assert absent.returncode == 127


def test_paths_in_commands_make_a_file_name() -> None:
    assert command_slug(["/opt/aws/neuron/bin/neuron-ls", "-j"]) == "_opt_aws_neuron_bin_neuron-ls_-j"
    assert command_slug(["modinfo", "-F", "version", "efa"]) == "modinfo_-F_version_efa"
    assert "/" not in command_slug(["../../etc/passwd", "a b;c"])


def test_the_fixture_inherits_nothing_of_this_machine(tree: Path) -> None:
    assert FixtureHost(tree).environ == {}
    assert FixtureHost(tree, environ={"A": "1"}).environ == {"A": "1"}


def test_this_machine_is_read_and_asked() -> None:
    host = LocalHost(environ={"PATH": os.environ["PATH"], "GREETING": "hello"})

    assert f"Pid:\t{os.getpid()}" in (host.read_text("/proc/self/status") or "")
    assert "/proc/self/status" in host.glob("/proc/self/stat*")
    assert host.run(["sh", "-c", "echo $GREETING; echo oops >&2; exit 3"]).__getstate__() == [3, "hello\n", "oops\n"]


def test_a_tool_that_is_missing_or_may_not_be_run_raises_nothing(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    host = LocalHost()

    assert host.run(["no-such-tool"]).returncode == 127
    assert host.run([str(plain)]).returncode == 126


def test_a_tool_past_its_deadline_ends_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    begun = time.monotonic()

    result = LocalHost().run([sys.executable, "-S", "-c", program], timeout_s=2.0)

    assert result.returncode == 124
    assert "no answer within 2 s" in result.stderr
    assert time.monotonic() - begun < 30
    deadline = time.monotonic() + 30  # the kernel ends a killed process when it next runs
    while running := [pid for pid in map(int, pids.read_text().split()) if _runs(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
