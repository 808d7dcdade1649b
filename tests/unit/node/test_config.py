"""The node file: what is accepted, and what every refusal says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvduplex.errors import KvduplexError
from kvduplex.node.config import Backend, NodeConfig, NodeRole
from kvduplex.node.document import NodeConfigError, dump_node, load_node, parse_node, read_node
from kvduplex.node.user_data import render_user_data
from kvduplex_transfer.interface import Role

PREFILL: dict[str, Any] = {
    "cluster": "demo",
    "role": "prefill",
    "backend": "neuron",
    "recipe": "qwen3-32b-trn2",
    "model": {"id": "Qwen/Qwen3-32B", "revision": "0123abcd", "source": "s3://weights-bucket/qwen3-32b/"},
}
ROUTER: dict[str, Any] = {
    "cluster": "demo",
    "role": "router",
    "router": {"bind_host": "0.0.0.0"},
    "discovery": {"ec2_tags": {"kvduplex:cluster": "demo"}},
    "keys": {"clients": {"secret": "kvduplex/demo/clients"}},
}


def changed(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `base` with the value at a dotted path replaced."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(base))
    *sections, last = path.split(".")
    target = copy
    for section in sections:
        target = target.setdefault(section, {})
    target[last] = value
    return copy


def test_a_prefill_node_is_read_with_its_defaults() -> None:
    config = parse_node(PREFILL, where="node.yaml")
    assert config.role is NodeRole.PREFILL
    assert config.backend is Backend.NEURON
    assert config.engine_roles == (Role.PREFILL,)
    assert not config.runs_router
    assert config.leases.decoder_kv_blocks_ttl == 480


def test_a_single_machine_runs_both_engines_and_the_router() -> None:
    config = parse_node({**PREFILL, "role": "all"}, where="node.yaml")
    assert config.engine_roles == (Role.PREFILL, Role.DECODE)
    assert config.runs_router


@pytest.mark.parametrize("values", [PREFILL, ROUTER], ids=["prefill", "router"])
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    config = parse_node(values, where="test")
    assert load_node(dump_node(config)) == config


@pytest.mark.parametrize(
    ("base", "path", "value", "said"),
    [
        (PREFILL, "state.url", "valkeys://store:6379", "state.url: role prefill runs no router"),
        (ROUTER, "state.url", "http://store:6379", "state.url: 'http://…' is not a state URL"),
        (ROUTER, "state.password.file", "/etc/kvduplex/store", "state: password is given without url"),
        (ROUTER, "state.password", "x", "state.password: input should be"),
        (PREFILL, "rolle", "prefill", "rolle: unknown key, did you mean role?"),
        (PREFILL, "model.revison", "x", "model.revison: unknown key, did you mean revision?"),
        (PREFILL, "engine.zzz", 1, "engine.zzz: unknown key; known keys: http_port"),
        (PREFILL, "keys.clients.token", "x", "keys.clients.token: unknown key; known keys: secret, file"),
        (PREFILL, "role", "both", "'prefill', 'decode', 'router' or 'all', got 'both'"),
        (PREFILL, "backend", "tpu", "'host', 'neuron' or 'gpu', got 'tpu'"),
        (PREFILL, "backend", None, "backend: role prefill needs one of host, neuron, gpu"),
        (PREFILL, "recipe", None, "recipe: backend neuron needs one"),
        (PREFILL, "cluster", "Demo Cluster", "cluster: string should match"),
        (PREFILL, "engine.http_port", 0, "engine.http_port: input should be greater than or equal to 1, got 0"),
        (PREFILL, "model.folder", "models", "model.folder: must be an absolute path without '..', got 'models'"),
        (PREFILL, "model.id", "/models/m", "source and revision do not apply"),
        (PREFILL, "model.source", "https://x/y", "model.source: string should match pattern"),
        (PREFILL, "leases.lease_ttl_s", 900, "longer than decoder_kv_blocks_ttl 480"),
        (PREFILL, "drain.group", "asg", "lifecycle_hook and group belong together"),
        (PREFILL, "version", 2, "version: input should be 1, got 2"),
        (ROUTER, "discovery.ec2_tags", {}, "discovery: a router needs its engines"),
        (ROUTER, "discovery.prefill", ["http://10.0.0.1:8100"], "exclude each other"),
        (ROUTER, "keys.clients", None, "router.bind_host 0.0.0.0 is reachable from other machines"),
        (ROUTER, "keys.clients.file", "/etc/keys", "exactly one of secret"),
        (ROUTER, "router.port", 70000, "router.port: input should be less than or equal to 65535, got 70000"),
    ],
)
def test_a_wrong_value_is_refused_with_place_and_remedy(
    base: dict[str, Any], path: str, value: object, said: str
) -> None:
    with pytest.raises(NodeConfigError) as caught:
        parse_node(changed(base, path, value), where="node.yaml")
    assert said in str(caught.value)
    assert str(caught.value).startswith("node.yaml: ")


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("http://10.0.0.1:8200#lease=10.0.0.1:5900", True),
        ("10.0.0.1:8200", False),
        ("http://10.0.0.1", False),
        ("http://user:secret@10.0.0.1:8200", False),
    ],
)
def test_an_engine_address_names_scheme_host_and_port(url: str, fine: bool) -> None:
    values = changed(ROUTER, "discovery", {"prefill": ["http://10.0.0.2:8100"], "decode": [url]})
    if fine:
        assert parse_node(values, where="x").discovery.decode == (url,)
    else:
        with pytest.raises(NodeConfigError, match=r"discovery\.decode\.0"):
            parse_node(values, where="x")


@pytest.mark.parametrize("text", ["- a\n", "", "a: [", "role: *x"])
def test_text_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(NodeConfigError, match=r"^node\.yaml: "):
        load_node(text, where="node.yaml")


def test_its_errors_are_explained_by_the_command_line() -> None:
    assert issubclass(NodeConfigError, KvduplexError)


def test_user_data_carries_the_file_unchanged() -> None:
    config = parse_node(ROUTER, where="x")
    text = render_user_data(config)
    assert text.startswith("#cloud-config\n")
    (file,) = yaml.safe_load(text)["write_files"]
    assert file["path"] == "/etc/kvduplex/node.yaml"
    assert file["permissions"] == "0640"
    assert load_node(file["content"]) == config


def test_user_data_larger_than_ec2_takes_is_refused() -> None:
    config: NodeConfig = parse_node({**PREFILL, "engine": {"options": {"x": "y" * 17_000}}}, where="x")
    with pytest.raises(NodeConfigError, match="EC2 takes at most 16384"):
        render_user_data(config)


@pytest.mark.infra
def test_cloud_init_accepts_the_user_data(tmp_path: Path) -> None:
    cloud_init = shutil.which("cloud-init")
    if cloud_init is None:
        pytest.skip("cloud-init is not installed")
    file = tmp_path / "user-data"
    file.write_text(render_user_data(parse_node(ROUTER, where="x")))
    done = subprocess.run(
        [cloud_init, "schema", "--config-file", str(file)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_container_reads_its_configuration_from_its_environment(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump(PREFILL))
    assert read_node(file, {}).role is NodeRole.PREFILL
    assert read_node(file, {"KVDUPLEX_NODE": yaml.safe_dump(ROUTER)}).role is NodeRole.ROUTER
    with pytest.raises(NodeConfigError, match=r"\$KVDUPLEX_NODE: rolle: unknown key"):
        read_node(file, {"KVDUPLEX_NODE": "rolle: router"})
    with pytest.raises(NodeConfigError, match="user data writes it"):
        read_node(tmp_path / "absent.yaml", {})


def test_a_password_in_the_stores_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(NodeConfigError) as caught:
        parse_node(changed(ROUTER, "state.url", "valkeys://user:hunter2@store:6379"), where="node.yaml")
    assert "state.url: the URL holds a password" in str(caught.value)
    assert "hunter2" not in str(caught.value)
