"""Each thing that can be missing is named with its cause and its way out, before anything is started."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvduplex.errors import PreflightError
from kvduplex.preflight import memory_findings, model_findings, port_findings, refuse_failures
from kvduplex.preflight.memory import available_bytes
from kvduplex.preflight.model import max_tokens, weight_bytes
from kvduplex.supervise import Unit, UnitKind
from kvduplex.tinymodel.tensorfile import write_tensors
from kvduplex_transfer.interface import Finding, Severity

GIB = 1 << 30
OPTIONS = {UnitKind.ENGINE: "--port-offset 1000", UnitKind.ROUTER: "--port 8001"}
MakeUnit = Callable[..., Unit]


def test_all_failures_are_told_at_once_and_nothing_else() -> None:
    fine = Finding("a.b", Severity.WARN, "seen", "expected", "why", "fix")
    first = Finding("c.d", Severity.FAIL, "nothing", "something", "it fails", "mend")
    with pytest.raises(PreflightError) as raised:
        refuse_failures([fine, first, first])
    paragraph = "- c.d: nothing; expected: something\n  it fails.\n  To mend it: mend"
    assert str(raised.value) == f"nothing was started:\n{paragraph}\n{paragraph}"
    refuse_failures([fine])


class TestPorts:
    """Free, or held by somebody with a name."""

    def test_free_ports_give_no_finding(self, make_unit: MakeUnit) -> None:
        assert port_findings([make_unit(""), make_unit("", "prefill-0")], options=OPTIONS) == []

    def test_the_holder_is_named_with_its_command_and_the_way_out(self, make_unit: MakeUnit) -> None:
        unit = make_unit("")
        with socket.socket() as held:
            held.bind(("127.0.0.1", unit.ports["http"]))
            held.listen()
            (finding,) = port_findings([unit], options=OPTIONS)
        assert f"127.0.0.1:{unit.ports['http']} (decode-0, http) is held by process {os.getpid()} (" in finding.seen
        assert finding.fix == f"end it (kill {os.getpid()}), or choose another: --port-offset 1000"

    def test_two_units_at_one_port_are_refused(self, make_unit: MakeUnit) -> None:
        unit = make_unit("")
        other = make_unit("", "router", kind=UnitKind.ROUTER, ports=unit.ports)
        (finding,) = port_findings([unit, other], options=OPTIONS)
        assert f"port {unit.ports['http']} is wanted by decode-0 (http) and router (http)" in finding.seen

    def test_an_address_of_another_machine_is_refused(self, make_unit: MakeUnit) -> None:
        (finding,) = port_findings([make_unit("", bind_host="192.0.2.1")], options=OPTIONS)
        assert "is not an address of this machine" in finding.seen


class TestMemory:
    """Numbers that add up."""

    def test_too_little_states_what_is_needed_and_what_there_is(self) -> None:
        (finding,) = memory_findings(engines=2, kv_bytes=GIB, weight_bytes=GIB // 2, available=6 * GIB)
        assert finding.severity is Severity.FAIL
        assert finding.seen == "6.0 GiB available"
        assert finding.expected == "7.0 GiB for 2 engines (2.0 base + 1.0 KV + 0.5 weights each)"
        assert "--kv-space" in finding.fix

    def test_enough_is_fine(self) -> None:
        (finding,) = memory_findings(engines=2, kv_bytes=GIB, weight_bytes=GIB, available=8 * GIB)
        assert finding.severity is Severity.OK

    def test_unknown_weights_are_said_to_be_unknown(self) -> None:
        (finding,) = memory_findings(engines=1, kv_bytes=GIB, weight_bytes=None, available=8 * GIB)
        assert finding.severity is Severity.WARN
        assert "weights unknown" in finding.expected

    def test_a_control_group_limits_what_is_available(self, tmp_path: Path) -> None:
        group = tmp_path / "sys/fs/cgroup/system.slice/x.service"
        group.mkdir(parents=True)
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/x.service\n")
        (group / "memory.max").write_text("max\n")
        (group / "memory.current").write_text("1\n")
        (group.parent / "memory.max").write_text("100000\n")
        (group.parent / "memory.current").write_text("60000\n")
        (group.parent / "memory.stat").write_text("anon 50000\ninactive_file 5000\n")
        assert available_bytes(tmp_path) == 45_000

    def test_without_control_groups_the_machine_decides(self, tmp_path: Path) -> None:
        assert available_bytes(tmp_path) > 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    import numpy as np  # noqa: PLC0415

    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["X"], "torch_dtype": "bfloat16", "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    write_tensors(folder / "model.safetensors", {"w": (64,)}, [("w", np.zeros(64, np.float32))])
    return folder


def seen(model: str | Path) -> list[str]:
    return [finding.seen for finding in model_findings(str(model))]


class TestModel:
    """A folder that an engine could load, or the reason why not."""

    def test_a_whole_folder_is_fine(self, model: Path) -> None:
        assert seen(model) == []

    def test_a_hub_id_is_left_to_the_engine(self) -> None:
        assert seen("Qwen/Qwen3-0.6B") == []

    @pytest.mark.parametrize("name", ["qwen", "/no/such/folder", "./here", "~/there", "a/b/c"])
    def test_an_unknown_name_is_refused(self, name: str) -> None:
        (finding,) = model_findings(name)
        assert finding.seen == f"--model {name}: no such folder, and not a hub id"
        assert finding.severity is Severity.FAIL

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("config.json", "has no config.json"),
            ("tokenizer.json", "has no tokenizer"),
            ("model.safetensors", "has no weights"),
        ],
    )
    def test_a_missing_part_is_named(self, model: Path, name: str, expected: str) -> None:
        (model / name).unlink()
        assert [expected in text for text in seen(model)] == [True]

    @pytest.mark.parametrize("content", ["", "[]", "{}", "{"])
    def test_a_configuration_of_something_else_is_refused(self, model: Path, content: str) -> None:
        (model / "config.json").write_text(content)
        assert seen(model) == [f"{model}/config.json names no architectures"]

    def test_a_pointer_of_git_lfs_is_recognised(self, model: Path) -> None:
        (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        (finding,) = model_findings(str(model))
        assert "Git LFS pointers" in finding.seen
        assert finding.fix == f"cd {model} && git lfs pull"

    @pytest.mark.parametrize("size", [0, 7, 40, -1])
    def test_weights_cut_short_are_recognised(self, model: Path, size: int) -> None:
        path = model / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        assert seen(model) == [f"{path} ends before its tensors do"]

    def test_a_missing_shard_is_named(self, model: Path) -> None:
        index: dict[str, Any] = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        assert seen(model) == [f"model-2.safetensors of model.safetensors.index.json missing in {model}"]

    def test_a_folder_that_this_user_may_not_look_into(self, hidden: Path) -> None:
        (finding,) = model_findings(str(hidden / "weights"))
        assert "Permission denied" in finding.seen

    @pytest.mark.parametrize("name", ["~nobody-of-that-name/weights", "x" * 300, "/" + "x" * 300])
    def test_names_that_no_file_system_has_are_refused(self, name: str) -> None:
        assert [finding.check for finding in model_findings(name)] == ["model.folder"]

    def test_limits_and_sizes_are_read(self, model: Path) -> None:
        stored = (model / "model.safetensors").stat().st_size
        assert max_tokens(model) == 2048
        assert weight_bytes(model, "float32") == 2 * stored
        assert weight_bytes(model, "auto") == stored
