"""A setting that is wrong stops the start, in words that name it."""

from __future__ import annotations

from typing import Any

import pytest

from kvduplex_connector.settings import LeaseSettings
from kvduplex_transfer.engine import connector_config
from kvduplex_transfer.engine_options import EngineOptions
from kvduplex_transfer.errors import ConfigError

BASE: dict[str, Any] = {"role": "decode", "model": "/m", "port": 8200}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_modellen": 4}, r"recipe r: max_modellen: unknown key, did you mean max_model_len\?"),
        ({"zzz": 4}, r"zzz: unknown key; known keys: .*block_size, .*"),
        ({"port": 0}, r"port: input should be greater than or equal to 1, got 0"),
        ({"port": 70000}, r"port: .*65535, got 70000"),
        ({"role": "both"}, r"role: input should be 'prefill' or 'decode', got 'both'"),
        ({"connector": "lmcache"}, r"connector: .*'none', 'stock' or 'leased', got 'lmcache'"),
        ({"model": ""}, r"model: .*at least 1 character"),
        ({"retention_budget": 1.5}, r"retention_budget: .*less than or equal to 0\.95, got 1\.5"),
        ({"decoder_kv_blocks_ttl": 0}, r"decoder_kv_blocks_ttl: .*, got 0"),
        ({"nixl_backends": []}, r"nixl_backends: .*at least 1 item"),
        ({"connector": "leased"}, r"lease_port is needed by a leased decode engine; give a free port"),
        (
            {"connector": "leased", "lease_port": 5900, "decoder_kv_blocks_ttl": 20},
            r"lease_ttl_s is 30, longer than decoder_kv_blocks_ttl 20: no lease outlives that; lower it",
        ),
        ({"side_channel_port": 8200}, r"must differ, got \[8200, 8200\]"),
        ({"connector_extra": {"lease_port": 1}}, r"connector_extra: must not hold lease_port; typed options set that"),
        ({"extra_argv": ["--port", "1"]}, r"extra_argv: must not hold --port; typed options set that"),
        ({"extra_argv": ["--max_model_len=1"]}, r"extra_argv: must not hold --max-model-len"),
        ({"extra_argv": ["--api-key", "s3cret"]}, r"extra_argv: must not hold --api-key, .*VLLM_API_KEY"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineOptions.parse({**BASE, **values}, where="recipe r")

    assert str(caught.value).startswith("recipe r: ")
    assert "s3cret" not in str(caught.value)


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions.parse({"role": "decode", "port": "x", "modle": "/m"}, where="r")

    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "r: model: missing, and it has no default" in lines
    assert "r: modle: unknown key, did you mean model?" in lines


def test_numbers_may_come_as_text() -> None:
    assert EngineOptions.parse({**BASE, "port": "8300"}, where="flags").port == 8300


def test_options_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EngineOptions.parse(BASE, where="test").port = 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "edge",
    [
        {"retention_budget": 0},
        {"retention_budget": 0.95},
        {"lease_ttl_s": 0.1},
        {"lease_ttl_s": 86_400, "decoder_kv_blocks_ttl": 86_400},
        {"lease_ttl_s": 1, "decoder_kv_blocks_ttl": 1},
        {"kv_recompute_threshold": 0},
        {"kv_recompute_threshold": 1_000_000},
        {"lease_port": 1},
        {"lease_port": 65_535},
    ],
)
def test_what_is_accepted_here_is_accepted_by_the_connector(role: str, edge: dict[str, Any]) -> None:
    values = {**BASE, "role": role, "connector": "leased", "lease_port": 5900, **edge}
    extra = connector_config(EngineOptions.parse(values, where="test"))["kv_connector_extra_config"]

    settings = LeaseSettings.parse(extra)

    for key in edge.keys() & extra.keys():
        assert getattr(settings, key) == edge[key]
