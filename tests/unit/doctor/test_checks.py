"""Checks on their own: what the fixture hosts do not reach."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest

from kvduplex_neuron.lines import LINES, Family, line_of
from kvduplex_transfer.hostchecks.findings import shorten
from kvduplex_transfer.hostchecks.instances import INSTANCE_TYPES, Accelerator
from kvduplex_transfer.hostchecks.loader import Loader
from kvduplex_transfer.hostchecks.nixlplugin import check_nixl_plugin, plugin_path
from kvduplex_transfer.hostchecks.ports import check_ports, listening_ports
from kvduplex_transfer.hostchecks.pythonenv import read_environment
from kvduplex_transfer.hostview import LocalHost
from kvduplex_transfer.interface import Severity
from kvduplex_transfer.recipes import Direction


def test_a_port_that_is_listened_on_is_named_with_its_purpose() -> None:
    host = LocalHost()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as other,
    ):
        port, port6 = server.getsockname()[1], other.getsockname()[1]
        assert {port, port6} <= listening_ports(host)
        finding = check_ports(host, {"prefill http": port, "decode http": 1})
        assert (finding.severity, finding.seen) == (Severity.WARN, f"in use: {port} (prefill http)")
    assert check_ports(host, {"prefill http": port}).severity is Severity.OK


def test_the_loader_finds_what_this_machine_loads() -> None:
    loader = Loader(LocalHost())
    assert loader.find("libc.so.6")
    assert loader.find("libkvduplex-does-not-exist.so.1") is None


def test_ld_library_path_comes_before_the_cache(host_tree: Any) -> None:
    tree = host_tree("trn2.48xlarge")
    tree.library("/srv/fabric/libfabric.so.1", cached=False)
    tree.environ["LD_LIBRARY_PATH"] = "/nowhere:/srv/fabric"
    assert Loader(tree.host).find("libfabric.so.1") == "/srv/fabric/libfabric.so.1"


def test_the_agent_probe_opens_a_real_agent() -> None:
    pytest.importorskip("nixl")
    argv = [sys.executable, "-m", "kvduplex_transfer.hostchecks.agentprobe", "UCX"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    outcome = json.loads(result.stdout.splitlines()[-1])
    assert (result.returncode, outcome["error"], outcome["rails"]) == (0, None, 0)
    assert "DRAM_SEG" in outcome["memory_types"]


def test_the_agent_probe_reports_a_plugin_that_cannot_be_loaded() -> None:
    pytest.importorskip("nixl")
    argv = [sys.executable, "-m", "kvduplex_transfer.hostchecks.agentprobe", "NO_SUCH_PLUGIN"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert json.loads(result.stdout.splitlines()[-1])["error"]


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.29.0.1.2.0", "0.29"), ("0.24.0.1.1.0", "0.24"), ("0.21.0.1.0.0", "0.21"), ("0.5.0", "0.5"), ("0.4.1", "0.4")],
)
def test_plugin_versions_belong_to_lines(version: str, name: str) -> None:
    line = line_of(version)
    assert line is not None
    assert line.name == name


@pytest.mark.parametrize("version", [None, "9.9", "not a version", "0.3.1"])
def test_other_plugin_versions_belong_to_none(version: str | None) -> None:
    assert line_of(version) is None


def test_every_neuron_family_has_a_line_and_only_new_ones_move_kv() -> None:
    for family in Family:
        assert any(family in line.families for line in LINES)
    moving = {family for line in LINES if line.direction is not Direction.NONE for family in line.families}
    assert moving == {Family.TRN2, Family.TRN3}


def test_the_instance_table_is_consistent() -> None:
    for name, row in INSTANCE_TYPES.items():
        assert name == row.name
        if row.accelerator is Accelerator.NEURON and row.efa_interfaces == 0:
            assert not row.device_rdma
    assert INSTANCE_TYPES["trn2.48xlarge"].efa_interfaces == INSTANCE_TYPES["trn2.48xlarge"].devices


def test_long_lists_are_cut() -> None:
    assert shorten(f"d{index}" for index in range(16)) == "d0, d1, d2, d3 and 12 more"
    assert shorten(["a", "b"]) == "a, b"


@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd")
def test_libraries_that_are_missing_here_are_those_that_the_real_loader_misses() -> None:
    environment = read_environment(LocalHost(), sys.executable)
    path = plugin_path(LocalHost(), environment)
    if path is None:
        pytest.skip("nixl is not installed")
    loaded = subprocess.run(["ldd", path], capture_output=True, text=True, timeout=60, check=True).stdout
    missing = {line.split()[0] for line in loaded.splitlines() if line.endswith("not found")}
    found = {finding.check: finding for finding in check_nixl_plugin(LocalHost(), environment)}
    assert (found["nixl.libraries"].severity is Severity.FAIL) == bool(missing)
    assert all(name in found["nixl.libraries"].seen for name in missing)
