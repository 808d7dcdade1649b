"""What must hold for every recipe this project ships."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from packaging.specifiers import SpecifierSet

from kvduplex_neuron.lines import LINES
from kvduplex_neuron.options import NeuronOptions
from kvduplex_transfer.hostchecks.instances import INSTANCE_TYPES, Accelerator
from kvduplex_transfer.interface import EnginePlan, Role
from kvduplex_transfer.recipes import Direction, Recipe, Topology

LOGICAL_CORES = {
    "trn1.32xlarge": 32,
    "trn1n.32xlarge": 32,
    "trn2.48xlarge": 64,
    "trn2u.48xlarge": 64,
    "trn3.48xlarge": 64,
}


def argument(plan: EnginePlan, flag: str) -> str:
    return plan.argv[plan.argv.index(flag) + 1]


def transfer_config(plan: EnginePlan) -> dict[str, object]:
    config: dict[str, object] = json.loads(argument(plan, "--kv-transfer-config"))
    return config


def test_names_are_unique_and_instance_types_known(shipped: dict[str, Recipe]) -> None:
    assert len(shipped) == 12
    for recipe in shipped.values():
        for name in recipe.hosts.instance_types:
            assert INSTANCE_TYPES[name].accelerator is Accelerator(recipe.backend)


def test_wanted_families_are_covered(shipped: dict[str, Recipe]) -> None:
    covered = {name.split(".")[0] for recipe in shipped.values() for name in recipe.hosts.instance_types}
    assert {"trn1", "trn1n", "trn2", "trn2u", "trn3", "p5", "p5e", "p5en"} <= covered


def test_every_recipe_says_who_ran_it_and_where_its_settings_come_from(shipped: dict[str, Recipe]) -> None:
    for recipe in shipped.values():
        assert "Not run by this project" in recipe.evidence
        assert recipe.sources


def test_ports_of_engines_on_one_host_never_meet(
    shipped: dict[str, Recipe], plans: Callable[[Recipe], list[EnginePlan]]
) -> None:
    for recipe in shipped.values():
        ports = [port for plan in plans(recipe) for port in plan.ports.values()]
        assert len(ports) == len(set(ports)), recipe.name


def test_servers_listen_only_where_peers_reach_them(
    shipped: dict[str, Recipe], plans: Callable[[Recipe], list[EnginePlan]]
) -> None:
    for recipe in shipped.values():
        for plan in plans(recipe):
            assert argument(plan, "--host") == "10.0.1.10"
            assert plan.environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.1.10") == "10.0.1.10"


def test_disaggregated_recipes_agree_between_roles(
    shipped: dict[str, Recipe], plans: Callable[[Recipe], list[EnginePlan]]
) -> None:
    for recipe in shipped.values():
        if recipe.topology is Topology.REPLICAS:
            continue
        prefill, decode = plans(recipe)
        configs = transfer_config(prefill), transfer_config(decode)
        assert [config.pop("kv_role") for config in configs] == ["kv_producer", "kv_consumer"]
        assert configs[0] == configs[1]
        assert configs[0]["kv_buffer_device"] == "cuda"
        assert argument(prefill, "--dtype") == argument(decode, "--dtype")


def test_neuron_recipes_fit_a_plugin_line_and_its_hardware(shipped: dict[str, Recipe]) -> None:
    for recipe in shipped.values():
        if recipe.backend != "neuron":
            continue
        line = next(line for line in LINES if line.plugin == SpecifierSet(recipe.stack.vllm_neuron or ""))
        assert SpecifierSet(recipe.stack.vllm) == line.vllm
        assert recipe.stack.neuron_sdk == line.sdk
        families = {name.split(".")[0].rstrip("nu") for name in recipe.hosts.instance_types}
        assert families <= {family.value for family in line.families}
        assert line.direction is not Direction.NONE or recipe.topology is Topology.REPLICAS


def test_neuron_core_ranges_fit_the_host_and_do_not_overlap(shipped: dict[str, Recipe]) -> None:
    for recipe in shipped.values():
        if recipe.backend != "neuron":
            continue
        taken: list[range] = []
        for role in recipe.roles():
            options = NeuronOptions.parse(recipe.options(role), where=recipe.name)
            for index in range(options.engines):
                first, last = options.cores(index)
                taken.append(range(first, last + 1))
        cores = [core for one in taken for core in one]
        assert max(cores) < min(LOGICAL_CORES[name] for name in recipe.hosts.instance_types)
        if recipe.hosts.both_roles_fit:
            assert len(cores) == len(set(cores)), recipe.name


def test_decode_engines_keep_the_graphs_they_need_to_prefill_a_suffix(shipped: dict[str, Recipe]) -> None:
    for recipe in shipped.values():
        assert recipe.options(Role.DECODE).get("skip_warmup") is None


@pytest.mark.parametrize("name", ["qwen3-32b-p5en", "glm-5-fp8-p5en"])
def test_published_p5en_settings(
    name: str, shipped: dict[str, Recipe], plans: Callable[[Recipe], list[EnginePlan]]
) -> None:
    prefill, decode = plans(shipped[name])
    for plan in (prefill, decode):
        assert argument(plan, "--tensor-parallel-size") == "8"
        assert argument(plan, "--max-model-len") == "32768"
        assert argument(plan, "--max-num-seqs") == "8"
        assert plan.environment["FI_PROVIDER"] == "efa"
        extra = transfer_config(plan)["kv_connector_extra_config"]
        assert extra == {
            "backends": ["LIBFABRIC"],
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 64,
            "decoder_kv_blocks_ttl": 480,
        }
    assert "--no-enable-prefix-caching" in prefill.argv
    assert "--no-enable-prefix-caching" not in decode.argv
