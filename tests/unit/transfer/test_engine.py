"""What an engine's command line and environment look like, in full."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvduplex_transfer.engine import connector_config, engine_argv, engine_plan
from kvduplex_transfer.engine_options import EngineOptions
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.interface import Role


def options(**values: Any) -> EngineOptions:
    return EngineOptions.parse({"role": "decode", "model": "/models/m", "port": 8200, **values}, where="test")


def test_the_whole_command_of_a_stock_engine() -> None:
    argv = engine_argv(
        options(
            served_model_name="m",
            side_channel_port=5700,
            dtype="float32",
            block_size=32,
            max_model_len=4096,
            kv_cache_memory_bytes=1 << 30,
            enforce_eager=True,
            prefix_caching=True,
            middleware=["kvduplex_connector.stream_params.StreamParams"],
            extra_argv=["--max-num-partial-prefills", "2"],
        ),
        "/venv/bin/python",
    )

    assert argv == (
        *("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "/models/m", "--served-model-name", "m", "--host", "127.0.0.1", "--port", "8200"),
        *("--tensor-parallel-size", "1", "--dtype", "float32", "--seed", "0", "--block-size", "32"),
        *("--max-model-len", "4096", "--kv-cache-memory-bytes", "1073741824"),
        *("--no-enable-log-requests", "--enable-prompt-tokens-details", "--enforce-eager", "--enable-prefix-caching"),
        *("--middleware", "kvduplex_connector.stream_params.StreamParams"),
        "--kv-transfer-config",
        (
            '{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_buffer_device":"cpu",'
            '"kv_load_failure_policy":"fail","kv_connector_extra_config":{"backends":["UCX"],"bidirectional_kv_xfer":true,'
            '"kv_recompute_threshold":64,"decoder_kv_blocks_ttl":480}}'
        ),
        *("--max-num-partial-prefills", "2"),
    )


def test_the_connector_of_a_leased_decode_engine() -> None:
    config = connector_config(options(connector="leased", lease_port=5900, lease_ttl_s=20, retention_budget=0.25))

    assert config == {
        "kv_connector": "LeasedNixlConnector",
        "kv_connector_module_path": "kvduplex_connector.connector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "backends": ["UCX"],
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 64,
            "decoder_kv_blocks_ttl": 480,
            "lease_ttl_s": 20.0,
            "retention_budget": 0.25,
            "lease_host": "127.0.0.1",
            "lease_port": 5900,
        },
    }


def test_a_leased_prefill_engine_listens_for_no_claims() -> None:
    prefill = options(role="prefill", connector="leased", lease_port=5800)
    plan = engine_plan(prefill, name="prefill-0")

    assert "lease_port" not in connector_config(prefill)["kv_connector_extra_config"]
    assert connector_config(prefill)["kv_role"] == "kv_producer"
    assert plan.lease_endpoint is None
    assert plan.ports == {"http": 8200, "side_channel": 5600}


def test_one_way_transfer_names_none_of_the_settings_of_the_way_back() -> None:
    assert connector_config(options(bidirectional=False))["kv_connector_extra_config"] == {"backends": ["UCX"]}


def test_a_platform_may_bring_its_own_connector_and_settings() -> None:
    config = connector_config(
        options(
            connector_class="NeuronNixlConnector",
            connector_module="platform.nixl",
            kv_buffer_device="cuda",
            nixl_backends=["LIBFABRIC"],
            connector_extra={"num_threads": 8},
        )
    )

    assert (config["kv_connector"], config["kv_connector_module_path"]) == ("NeuronNixlConnector", "platform.nixl")
    assert config["kv_buffer_device"] == "cuda"
    assert config["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
    assert config["kv_connector_extra_config"]["num_threads"] == 8


def test_a_plain_engine_has_no_connector_at_all() -> None:
    plan = engine_plan(options(connector="none"), name="plain", interpreter="python")

    assert "--kv-transfer-config" not in plan.argv
    assert plan.ports == {"http": 8200}
    assert not any(key.startswith("VLLM_NIXL") for key in plan.environment)
    with pytest.raises(ValueError, match="connector is 'none'"):
        connector_config(options(connector="none"))


@pytest.mark.parametrize(
    ("prefix_caching", "expected"),
    [(True, "--enable-prefix-caching"), (False, "--no-enable-prefix-caching"), (None, None)],
)
def test_prefix_caching_is_on_off_or_left_alone(prefix_caching: bool | None, expected: str | None) -> None:
    given = [flag for flag in engine_argv(options(prefix_caching=prefix_caching)) if "prefix-caching" in flag]

    assert given == ([] if expected is None else [expected])


def test_the_plan_says_where_everything_is() -> None:
    plan = engine_plan(
        options(connector="leased", lease_port=5900, side_channel_port=5700),
        name="decode-0",
        environment={"OMP_NUM_THREADS": "1"},
        interpreter="python",
    )

    assert (plan.name, plan.role) == ("decode-0", Role.DECODE)
    assert plan.url == "http://127.0.0.1:8200"
    assert plan.lease_endpoint == "tcp://127.0.0.1:5900"
    assert plan.ports == {"http": 8200, "side_channel": 5700, "lease": 5900}
    assert plan.environment == {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700",
        "OMP_NUM_THREADS": "1",
    }


def test_wildcards_are_bound_and_never_advertised() -> None:
    plan = engine_plan(
        options(host="0.0.0.0", side_channel_host="10.0.0.7", connector="leased", lease_host="::", lease_port=5900),
        name="decode-0",
    )

    assert plan.url == "http://10.0.0.7:8200"
    assert plan.lease_endpoint == "tcp://10.0.0.7:5900"
    with pytest.raises(ConfigError, match=r"side_channel_host: .*cannot be a wildcard.*, got '0\.0\.0\.0'"):
        options(side_channel_host="0.0.0.0")


def test_ipv6_addresses_are_bracketed() -> None:
    plan = engine_plan(options(host="fd00::1", connector="leased", lease_host="fd00::1", lease_port=5900), name="d")

    assert plan.url == "http://[fd00::1]:8200"
    assert plan.lease_endpoint == "tcp://[fd00::1]:5900"


@pytest.mark.parametrize(("model", "offline"), [("/m", True), ("./m", True), ("~/m", True), ("Qwen/Qwen3-32B", False)])
def test_the_hub_is_cut_off_only_when_the_model_is_a_folder(model: str, offline: bool) -> None:
    assert ("HF_HUB_OFFLINE" in engine_plan(options(model=model), name="d").environment) is offline


def test_requests_are_never_logged() -> None:
    assert "--no-enable-log-requests" in engine_argv(options())


def test_an_environment_that_contradicts_the_options_is_refused() -> None:
    with pytest.raises(ConfigError, match="VLLM_NIXL_SIDE_CHANNEL_PORT is set by typed options"):
        engine_plan(options(), name="d", environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": "1"})


def test_the_transfer_configuration_is_json() -> None:
    argv = engine_argv(options(connector_extra={"note": 'quotes " and spaces'}))

    parsed = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert parsed["kv_connector_extra_config"]["note"] == 'quotes " and spaces'
