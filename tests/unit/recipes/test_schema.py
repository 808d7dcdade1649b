"""The recipe format: what is refused, with which words, and how settings combine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvduplex.units import router_entry
from kvduplex_gpu.backend import GpuBackend
from kvduplex_neuron.backend import NeuronBackend, neuron_recipes
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.interface import Role
from kvduplex_transfer.recipes import Catalogue, Recipe

MINIMAL: dict[str, Any] = {
    "name": "mine",
    "summary": "One.",
    "backend": "neuron",
    "model": "org/model",
    "stack": {"vllm": ">=0.29,<0.30"},
    "evidence": "None.",
    "sources": ["here"],
    "engine": {"advertised_host": "10.0.0.1"},
}


def recipe(**changes: Any) -> Recipe:
    return Recipe.parse(MINIMAL | changes, where="recipe mine.yaml")


def test_a_role_lies_on_top_of_the_common_settings_and_mappings_merge() -> None:
    both = {"max_num_seqs": 4, "additional_config": {"neuron_config": {"a": 1, "b": 2}}}
    own = {"max_num_seqs": 8, "additional_config": {"neuron_config": {"b": 3}}}
    options = recipe(engine=both, decode=own)
    assert options.options(Role.PREFILL) == both
    assert options.options(Role.DECODE) == {"max_num_seqs": 8, "additional_config": {"neuron_config": {"a": 1, "b": 3}}}


def test_an_override_wins_over_a_role_and_leaves_the_original_alone() -> None:
    original = recipe(prefill={"prefix_caching": False})
    changed = original.overridden({"prefix_caching": True}, model="/models/mine")
    assert changed.options(Role.PREFILL)["prefix_caching"] is True
    assert changed.model == "/models/mine"
    assert original.options(Role.PREFILL)["prefix_caching"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": {}}, "recipe mine.yaml: engines: unknown key, did you mean engine"),
        ({"stack": {"vllm": "newest"}}, "stack.vllm: is no version specifier"),
        ({"backend": "tpu"}, "backend: "),
        ({"name": "Mine!"}, "name: "),
        ({"sources": []}, "sources: "),
        ({"topology": "replicas"}, "use direction none with it"),
        ({"direction": "none"}, "use direction none with it"),
        ({"topology": "replicas", "direction": "none", "prefill": {"engines": 2}}, "no prefill engines"),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 8}, "tensor_parallel: unknown key, did you mean tensor_parallel_size"),
        ({"max_num_seqs": 0}, "recipe mine, decode: max_num_seqs: .* got 0"),
        ({"advertised_host": "0.0.0.0"}, "advertised_host is 0.0.0.0, which peers cannot dial"),
        ({"advertised_host": None}, "advertised_host is missing"),
        ({"cache_dir": "cache"}, "cache_dir: must be an absolute path"),
        ({"flags": ["--port", "1"]}, "must not hold --port"),
        ({"first_core": -1}, "first_core: "),
        ({"compile_timeout_s": 5}, "compile_timeout_s: "),
        ({"skip_warmup": "both"}, "skip_warmup: "),
    ],
)
def test_a_wrong_setting_is_refused_when_the_engine_is_planned(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NeuronBackend(interpreter="python").engine_plan(recipe(decode=options), Role.DECODE)


def test_an_engine_beyond_the_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine index 1 is outside 0\.\.0; raise engines"):
        NeuronBackend(interpreter="python").engine_plan(recipe(), Role.DECODE, 1)


def test_a_gpu_setting_is_no_neuron_setting() -> None:
    with pytest.raises(ConfigError, match="transport: unknown key"):
        NeuronBackend(interpreter="python").engine_plan(recipe(engine={"transport": "efa"}), Role.DECODE)


def test_leased_decode_engines_publish_where_claims_go() -> None:
    leased = recipe(engine=MINIMAL["engine"] | {"connector": "leased", "data_parallel_size": 2})
    plan = NeuronBackend(interpreter="python").engine_plan(leased, Role.DECODE)
    assert plan.lease_endpoint == "tcp://10.0.0.1:5900"
    assert (plan.ports["lease"], plan.ports["lease_1"], plan.ports["side_channel_1"]) == (5900, 5901, 5701)
    assert router_entry(plan) == "http://10.0.0.1:8200#lease=10.0.0.1:5900&dp_size=2", "one for each rank"
    prefill = NeuronBackend(interpreter="python").engine_plan(leased, Role.PREFILL)
    assert router_entry(prefill) == "http://10.0.0.1:8100#dp_size=2"


def test_engines_of_one_host_take_consecutive_cores_and_gpus() -> None:
    settings = MINIMAL["engine"] | {"engines": 3, "tensor_parallel_size": 2}
    neuron = NeuronBackend(interpreter="python").engine_plan(
        recipe(engine=settings | {"first_core": 8}), Role.DECODE, 2
    )
    assert neuron.environment["NEURON_VISIBLE_DEVICES"] == "12-13"
    gpu = GpuBackend(interpreter="python").engine_plan(
        recipe(backend="gpu", engine=settings | {"first_device": 1}), Role.DECODE, 2
    )
    assert gpu.environment["CUDA_VISIBLE_DEVICES"] == "5,6"


def test_a_plain_engine_carries_nothing_of_a_transfer() -> None:
    plain = recipe(engine=MINIMAL["engine"] | {"connector": ConnectorKind.NONE}, topology="replicas", direction="none")
    plan = NeuronBackend(interpreter="python").engine_plan(plain, Role.DECODE)
    assert plan.name == "engine-0"
    assert "--kv-transfer-config" not in plan.argv
    assert not any(name.startswith(("FI_", "VLLM_NIXL")) for name in plan.environment)


def test_environment_of_a_recipe_wins_and_numbers_are_text() -> None:
    own = recipe(engine=MINIMAL["engine"] | {"environment": {"FI_PROVIDER": "efa", "NEURON_RT_LOG_LEVEL": 3}})
    plan = NeuronBackend(interpreter="python").engine_plan(own, Role.PREFILL)
    assert plan.environment["NEURON_RT_LOG_LEVEL"] == "3"


def test_compile_settings_become_environment() -> None:
    own = {
        "cache_dir": "/nvme/vllm",
        "shared_compile_cache": "/fsx/graphs",
        "compiled_only": True,
        "skip_warmup": "decode",
    }
    plan = NeuronBackend(interpreter="python").engine_plan(recipe(prefill=own), Role.PREFILL)
    assert plan.environment["VLLM_CACHE_ROOT"] == "/nvme/vllm"
    assert plan.environment["NEURON_LIBTORCH_REMOTE_CACHE"] == "/fsx/graphs"
    assert plan.environment["VLLM_NEURON_DISABLE_WARMUP_COMPILE"] == "1"
    assert plan.environment["VLLM_NEURON_SKIP_DECODE_WARMUP"] == "1"


def test_an_unknown_recipe_names_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-8b-trn2"):
        neuron_recipes().load("llama-3.1-8b-tr2")


def test_a_recipe_of_another_backend_names_the_right_command(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("summary: x\nbackend: gpu\nmodel: m\nstack: {vllm: '>=0.29'}\nevidence: x\nsources: [x]\n")
    with pytest.raises(ConfigError, match="kvduplex serve gpu --recipe"):
        neuron_recipes().load(str(path))
    assert Catalogue("gpu", tmp_path).load("mine").name == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [("- a list\n", "must hold a mapping"), ("a: [\n", "is not YAML"), ("summary: x\n", "model: missing")],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        neuron_recipes().load(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; known recipes"):
        neuron_recipes().load(str(tmp_path / "none.yaml"))
