"""Everything the engine builder can say, against vLLM's own argument parser, so that no flag is invented."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from kvduplex_transfer.engine import engine_argv
from kvduplex_transfer.engine_options import EngineOptions

pytestmark = pytest.mark.engine

EVERYTHING: dict[str, Any] = {
    "model": "/models/m",
    "port": 8200,
    "served_model_name": "m",
    "side_channel_port": 5700,
    "lease_port": 5900,
    "tensor_parallel_size": 2,
    "dtype": "float32",
    "seed": 7,
    "block_size": 64,
    "max_model_len": 2048,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
    "prefix_caching": False,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 123456789,
    "kv_recompute_threshold": 96,
    "decoder_kv_blocks_ttl": 60,
    "nixl_backends": ["UCX"],
    "connector_extra": {"num_threads": 2},
    "middleware": ["one.Middleware", "two.Middleware"],
    "extra_argv": ["--generation-config", "vllm"],
}
Parse = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def parse() -> Parse:
    """Options through our builder and then through the parser of vLLM's API server."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        flags = importlib.import_module("vllm.entrypoints.launchers.cli_args")
        parser = flags.make_arg_parser(importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())

    def parsed(values: dict[str, Any]) -> Any:
        namespace = parser.parse_args(list(engine_argv(EngineOptions.parse(values, where="test"))[3:]))
        flags.validate_parsed_serve_args(namespace)
        return namespace

    return parsed


def test_every_option_arrives_under_its_name(parse: Parse) -> None:
    values = {**EVERYTHING, "role": "decode", "connector": "leased"}

    arrived = parse(values)

    same = {"model", "port", "tensor_parallel_size", "dtype", "seed", "block_size", "max_model_len", "max_num_seqs"}
    same |= {"max_num_batched_tokens", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes", "middleware"}
    assert {name: getattr(arrived, name) for name in same} == {name: values[name] for name in same}
    assert arrived.served_model_name == ["m"]
    assert (arrived.enable_prefix_caching, arrived.enable_log_requests) == (False, False)
    assert (arrived.host, arrived.generation_config) == ("127.0.0.1", "vllm")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("connector", ["stock", "leased"])
def test_the_connector_configuration_is_vllms(parse: Parse, role: str, connector: str) -> None:
    config = parse({**EVERYTHING, "role": role, "connector": connector}).kv_transfer_config

    assert config.kv_role == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    assert config.is_kv_transfer_instance
    assert config.kv_buffer_device == "cpu"
    assert config.get_from_extra_config("kv_recompute_threshold", None) == 96
    assert config.get_from_extra_config("num_threads", None) == 2


def test_a_plain_engine_has_no_transfer(parse: Parse) -> None:
    assert parse({"role": "decode", "model": "/m", "port": 8200, "connector": "none"}).kv_transfer_config is None
