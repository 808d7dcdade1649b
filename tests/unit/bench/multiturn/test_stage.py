"""What `--serve cpu` starts, and what of it stands in records."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvduplex_bench.cluster import Cluster
from kvduplex_bench.errors import ClusterError
from kvduplex_bench.multiturn import stage as stages
from kvduplex_bench.multiturn.provenance import provenance
from kvduplex_bench.multiturn.stage import CpuStage, Setting
from kvduplex_bench.multiturn.workload import Arm

STAGE = CpuStage(model="/home/somebody/models/qwen3", max_model_len=32_768, kv_gib=1.0, cores=2)
READY = {
    "seconds": 31.0,
    "model": "qwen3",
    "logs": "/home/somebody/logs",
    "engines": [
        {"name": "prefill-0", "role": "prefill", "url": "http://127.0.0.1:8100", "ports": {"http": 8100}, "pid": 7},
        {"name": "decode-0", "role": "decode", "url": "http://127.0.0.1:8200", "ports": {"lease": 5900}, "pid": 8},
    ],
}
CLUSTER = Cluster("http://127.0.0.1:8000", ("http://127.0.0.1:8100",), ("http://127.0.0.1:8200",), READY)


def test_a_setting_decides_about_the_prefill_cache() -> None:
    off, on = Setting("leased", prefill_cache=False), Setting("stock", prefill_cache=True)
    assert "--no-prefill-prefix-cache" in STAGE.arguments(off, 1, 2)
    arguments = STAGE.arguments(on, 8000, 10_000)
    assert "--prefill-prefix-cache" in arguments
    assert arguments[arguments.index("--connector") + 1] == "stock"
    assert (off.name, on.name) == ("leased, prefill cache off", "stock, prefill cache on")


def test_floor_is_played_where_there_is_a_cache() -> None:
    wanted = [Arm.OFF, Arm.ON, Arm.FLOOR]
    assert Setting("leased", prefill_cache=False).arms(wanted) == [Arm.OFF, Arm.ON]
    assert Setting("leased", prefill_cache=True).arms(wanted) == wanted


def test_records_name_no_folder_process_or_port_of_the_machine() -> None:
    about = json.dumps(stages._about(CLUSTER, STAGE.arguments(Setting("leased", prefill_cache=True), 8000, 10_000)))
    assert "somebody" not in about
    assert "pid" not in about
    assert "qwen3" in about


def test_the_second_router_knows_the_same_engines() -> None:
    arguments = stages._router_arguments(CLUSTER, 9000, ["--reuse", "off"])
    assert arguments == [
        "--listen", "127.0.0.1:9000", "--prefill", "http://127.0.0.1:8100",
        "--decode", "http://127.0.0.1:8200#lease=127.0.0.1:5900", "--reuse", "off",
    ]  # fmt: skip


def test_the_reference_is_the_prefill_engine_when_it_keeps_nothing() -> None:
    routers = {Arm.ON: CLUSTER.url}
    assert stages._target(CLUSTER, Setting("leased", prefill_cache=False), routers).reference == CLUSTER.prefill[0]
    assert stages._target(CLUSTER, Setting("leased", prefill_cache=True), routers).reference is None


def test_a_second_router_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ClusterError, match="ended with status 1"), stages._router(["--listen", "127.0.0.1:1"], 1):
        pass


def test_provenance_hides_keys_and_the_home_folder() -> None:
    argv = ["bench", "multiturn", "--api-key", "hush", "--output", str(Path.home() / "run.jsonl"), "--turns", "3"]
    found = provenance(argv, now=lambda: datetime(2026, 11, 30, tzinfo=UTC))
    assert found["date"] == "2026-11-30T00:00:00+00:00"
    assert found["command"][1:] == ["bench", "multiturn", "--api-key", "...", "--output", "~/run.jsonl", "--turns", "3"]
    assert found["versions"]["kvduplex"]
    assert found["host"]["cores"] >= 1
