"""From the node file to what is started: engines of every backend, and the router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvduplex.node.discovery import Engines
from kvduplex.node.document import NodeConfigError, parse_node
from kvduplex.node.engine import LOOPBACK, backend_of, engine_plan_of
from kvduplex.node.routing import check_router_file, router_document
from kvduplex.node.run_router import engine_urls
from kvduplex_transfer.interface import EnginePlan, Role

HOST: dict[str, Any] = {"cluster": "demo", "role": "decode", "backend": "host", "model": {"id": "/models/tiny"}}
NEURON: dict[str, Any] = {"cluster": "demo", "role": "prefill", "backend": "neuron", "recipe": "llama-3.1-8b-trn2"}
ROUTER: dict[str, Any] = {
    "cluster": "demo",
    "role": "router",
    "discovery": {"prefill": ["http://10.0.0.1:8100"], "decode": ["http://10.0.0.2:8200#lease=10.0.0.2:5900"]},
}


def plan(values: dict[str, Any], role: Role, address: str = "10.0.0.7") -> EnginePlan:
    return engine_plan_of(parse_node(values, where="x"), role, address=address, interpreter="/opt/engine/python")


def flag(found: EnginePlan, name: str) -> str:
    return found.argv[found.argv.index(name) + 1]


def connector(found: EnginePlan) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(flag(found, "--kv-transfer-config"))
    return config


def test_an_engine_alone_on_its_machine_is_reached_by_others_and_by_the_machine_itself() -> None:
    found = plan(HOST, Role.DECODE)
    assert found.argv[0] == "/opt/engine/python"
    assert flag(found, "--host") == "0.0.0.0"
    assert found.url == "http://10.0.0.7:8200"
    assert found.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"


def test_engines_that_share_a_machine_stay_on_it() -> None:
    values = HOST | {"role": "all"}
    prefill, decode = plan(values, Role.PREFILL, LOOPBACK), plan(values, Role.DECODE, LOOPBACK)
    assert flag(prefill, "--host") == LOOPBACK
    assert set(prefill.ports.values()).isdisjoint(decode.ports.values())
    assert prefill.environment["VLLM_CPU_OMP_THREADS_BIND"] != "" != decode.environment["VLLM_CPU_OMP_THREADS_BIND"]


def test_a_role_of_another_machine_is_refused() -> None:
    with pytest.raises(NodeConfigError, match="this machine is decode, so it runs no prefill engine"):
        plan(HOST, Role.PREFILL)


def test_two_engines_of_one_machine_cannot_share_a_port() -> None:
    with pytest.raises(NodeConfigError, match=r"engine\.http_port: role all runs two engines"):
        parse_node(HOST | {"role": "all", "engine": {"http_port": 9000}}, where="x")


def test_lease_settings_reach_the_connector_only_when_given() -> None:
    given = HOST | {"engine": {"connector": "leased"}, "leases": {"lease_ttl_s": 12, "retention_budget": 0.25}}
    extra = connector(plan(given, Role.DECODE))["kv_connector_extra_config"]
    assert (extra["lease_ttl_s"], extra["retention_budget"]) == (12, 0.25)


def test_options_of_the_file_win_over_the_recipe() -> None:
    values = NEURON | {"engine": {"options": {"max_model_len": 1234}}}
    assert flag(plan(values, Role.PREFILL), "--max-model-len") == "1234"
    with pytest.raises(NodeConfigError, match="max_modle_len: unknown key"):
        plan(NEURON | {"engine": {"options": {"max_modle_len": 1}}}, Role.PREFILL)


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(NodeConfigError, match=r"did you mean llama-3\.1-8b-trn2"):
        plan(NEURON | {"recipe": "llama-3.1-8b-trn"}, Role.PREFILL)


def test_weights_from_s3_are_served_from_their_folder_under_their_name() -> None:
    model = {"id": "Qwen/Qwen3-32B", "revision": "abc", "source": "s3://bucket/qwen3", "folder": "/data"}
    found = plan(NEURON | {"model": model}, Role.PREFILL)
    assert flag(found, "--model") == "/data/Qwen--Qwen3-32B/abc"
    assert flag(found, "--served-model-name") == "Qwen/Qwen3-32B"
    assert found.environment["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(("values", "role"), [(NEURON, Role.PREFILL), (HOST, Role.DECODE)], ids=["neuron", "host"])
def test_weights_from_the_hub_are_pinned_and_kept_in_the_model_folder(values: dict[str, Any], role: Role) -> None:
    found = plan(values | {"model": {"id": "Qwen/Qwen3-32B", "revision": "abc", "folder": "/data"}}, role)
    assert flag(found, "--revision") == "abc"
    assert found.environment["HF_HOME"] == "/data/.hub"


def test_compiled_graphs_are_kept_where_the_file_says() -> None:
    values = NEURON | {"compile_cache": {"folder": "/data/graphs"}, "engine": {"start_timeout_s": 99}}
    found = plan(values, Role.PREFILL)
    assert found.environment["VLLM_CACHE_ROOT"] == "/data/graphs"
    assert found.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "99"


def test_the_routers_file_is_one_that_the_router_takes(tmp_path: Path) -> None:
    config = parse_node(ROUTER | {"keys": {"engines": {"file": "/k"}}, "drain": {"timeout_s": 30}}, where="x")
    engines = Engines(config.discovery.prefill, config.discovery.decode)
    file = tmp_path / "router.yaml"
    file.write_text(router_document(config, engines, keys_file=tmp_path / "keys.yaml"))
    found = check_router_file(file)
    assert found.decode[0].lease == "10.0.0.2:5900"
    assert found.timeouts.shutdown_s == 30
    assert found.conversations.usable_s < config.leases.decoder_kv_blocks_ttl
    assert found.auth.engine_key_env == "KVDUPLEX_ENGINE_KEY"
    assert found.auth.keys_file == tmp_path / "keys.yaml"


def test_the_routers_own_options_are_merged_and_checked(tmp_path: Path) -> None:
    config = parse_node(ROUTER | {"router": {"options": {"retries": 2, "timeouts": {"idle_s": 9}}}}, where="x")
    file = tmp_path / "router.yaml"
    file.write_text(router_document(config, Engines(("http://a:1",), ("http://b:1",)), keys_file=None))
    found = check_router_file(file)
    assert (found.retries, found.timeouts.idle_s, found.timeouts.shutdown_s) == (2, 9, 120)
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "retrys": 1}))
    with pytest.raises(NodeConfigError, match=r"router\.options or discovery: .*retrys: unknown key"):
        check_router_file(file)


def test_a_machine_that_runs_everything_routes_to_its_own_engines() -> None:
    values = HOST | {"role": "all", "engine": {"connector": "leased"}}
    found = engine_urls(parse_node(values, where="x"), interpreter="python")
    assert found.prefill == ("http://127.0.0.1:8100",)
    assert found.decode == ("http://127.0.0.1:8200#lease=127.0.0.1:5900",)


@pytest.mark.parametrize(
    ("recipe", "options", "plugin"),
    [
        ("qwen3-32b-p5en", {}, "LIBFABRIC"),
        ("qwen3-8b-two-gpus", {}, "UCX"),
        ("qwen3-32b-p5en", {"transport": "ucx"}, "UCX"),
    ],
)
def test_a_machine_is_checked_for_the_transport_of_its_recipe(recipe: str, options: Any, plugin: str) -> None:
    values = {"cluster": "demo", "role": "prefill", "backend": "gpu", "recipe": recipe, "engine": {"options": options}}
    backend = backend_of(parse_node(values, where="x"), interpreter="python3")
    assert list(backend.nixl_settings().backends) == [plugin]


def test_an_unknown_recipe_is_refused_before_any_check() -> None:
    values = {"cluster": "demo", "role": "prefill", "backend": "gpu", "recipe": "nothing"}
    with pytest.raises(NodeConfigError, match="nothing"):
        backend_of(parse_node(values, where="x"), interpreter="python3")
