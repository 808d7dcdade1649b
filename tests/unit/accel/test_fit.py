"""Whether a recipe fits a host: judged from the facts of its report."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvduplex.accel_cluster import AccelCluster, HostRole, plan_cluster
from kvduplex.accel_fit import fit_findings
from kvduplex.cpu_cluster import parse_settings

TRN2 = {
    "instance_type": "trn2.48xlarge",
    "logical_cores": "64",
    "vllm": "0.29.0",
    "vllm_neuron": "0.29.0.1.2.0",
    "nixl": "1.4.1",
}
P5EN = {"instance_type": "p5en.48xlarge", "gpus": "8", "vllm": "0.29.0", "nixl": "1.4.1"}


def checks(recipe: str, facts: dict[str, str], backend: Any = "neuron", **wishes: Any) -> set[str]:
    planned = plan_cluster(AccelCluster(backend=backend, recipe=recipe, **wishes))
    found = list(fit_findings(planned, facts, environ={"VLLM_CACHE_ROOT": tempfile.gettempdir()}))
    assert all(finding.why and finding.fix for finding in found)
    return {finding.check for finding in found}


def test_a_recipe_on_the_host_it_was_written_for() -> None:
    assert checks("llama-3.3-70b-trn2", TRN2) == set()
    assert checks("qwen3-32b-p5en", P5EN, "gpu", role=HostRole.PREFILL) == set()


def test_a_recipe_for_another_host() -> None:
    assert checks("gpt-oss-20b-trn3", TRN2) == {"recipe.instance"}
    assert checks("qwen3-32b-p5en", P5EN | {"instance_type": "p5.48xlarge"}, "gpu", role=HostRole.DECODE) == {
        "recipe.instance"
    }


def test_both_roles_on_a_host_with_too_few_devices() -> None:
    assert checks("llama-3.3-70b-trn2", TRN2 | {"logical_cores": "32"}) == {"recipe.devices"}
    assert checks("llama-3.3-70b-trn2", TRN2 | {"logical_cores": "32"}, role=HostRole.PREFILL) == set()
    assert checks("qwen3-8b-two-gpus", P5EN | {"gpus": "1"}, "gpu") == {"recipe.devices"}


def test_roles_that_share_devices_are_refused_unless_they_share_memory_too() -> None:
    overlap = parse_settings(["decode.first_core=4"])
    assert checks("llama-3.1-8b-trn2", TRN2, settings=overlap) == {"recipe.devices"}
    assert checks("qwen3-8b-two-gpus", P5EN, "gpu", settings=parse_settings(["first_device=0"])) == {"recipe.devices"}
    assert checks("qwen3-0.6b-single-gpu", P5EN | {"gpus": "1"}, "gpu") == set()


@pytest.mark.parametrize(
    ("fact", "value", "check"),
    [
        ("vllm", "0.32.0", "recipe.vllm"),
        ("vllm_neuron", "0.24.0.1.1.0", "recipe.vllm_neuron"),
        ("nixl", "1.3.0", "recipe.nixl"),
    ],
)
def test_other_versions_than_the_recipes(fact: str, value: str, check: str) -> None:
    assert checks("llama-3.1-8b-trn2", TRN2 | {fact: value}) == {check}


def test_missing_weights(tmp_path: Path) -> None:
    empty = tmp_path / "weights"
    empty.mkdir()
    assert "model.weights" in checks("llama-3.1-8b-trn2", TRN2, model=str(empty))
    assert checks("llama-3.1-8b-trn2", TRN2, model=str(tmp_path / "none")) == {"model.folder"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_compile_cache_that_cannot_be_written(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert checks("llama-3.1-8b-trn2", TRN2, settings=parse_settings([f"cache_dir={locked}"])) == {"recipe.cache_dir"}


def test_a_compile_cache_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = parse_settings([f"cache_dir={tmp_path}/file/graphs", f"download_dir={tmp_path}/file"])
    assert checks("llama-3.1-8b-trn2", TRN2, settings=settings) == {"recipe.cache_dir", "recipe.download_dir"}


def test_folders_that_this_user_may_not_look_into(hidden: Path) -> None:
    settings = parse_settings([f"cache_dir={hidden}/graphs"])
    assert checks("llama-3.1-8b-trn2", TRN2, settings=settings) == {"recipe.cache_dir"}
    assert checks("llama-3.1-8b-trn2", TRN2, model=f"{hidden}/weights") == {"model.folder"}
