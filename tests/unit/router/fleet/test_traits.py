"""What engines say of themselves, read from the forms that vLLM and SGLang use."""

from __future__ import annotations

import pytest

from kvduplex_router.fleet.traits import Load, Traits, conflict, read_load, read_traits

VLLM = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",engine="0"} 1.0
vllm:num_requests_running{engine="0",model_name="a {strange} name"} 3.0
vllm:num_requests_running{engine="1",model_name="a {strange} name"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
"""
MODELS = {"data": [{"id": "adapter", "root": "lora", "parent": "m"}, {"id": "m", "root": "/models/m", "parent": None}]}


def test_vllm() -> None:
    traits = read_traits(models=MODELS, version={"version": "0.32.0+cpu"}, exposition=VLLM)
    assert traits == Traits("vllm", "0.32.0", "/models/m", 32, "auto", ("adapter", "m"))


def test_sglang() -> None:
    info = {"model_path": "/models/m", "revision": "abc", "page_size": 64, "version": "0.5.6", "kv_cache_dtype": "auto"}
    assert read_traits(models=MODELS, server_info=info) == Traits(
        "sglang", "0.5.6", "/models/m@abc", 64, "auto", ("adapter", "m")
    )


@pytest.mark.parametrize("answer", [None, [], "text", 5, {"data": 1}, {"data": [None]}, {"data": [{"id": 1}]}])
def test_nonsense_is_not_known(answer: object) -> None:
    traits = read_traits(models=answer, version=answer, exposition="vllm:cache_config_info{block_size=3} 1")
    assert (traits.version, traits.model, traits.block_size, traits.names) == (None, None, None, ())


def test_load_adds_engine_cores_up_and_takes_the_fullest() -> None:
    assert read_load(VLLM, 7.0) == Load(5.0, 4.0, 0.75, 7.0)
    sglang = '\nsglang:num_running_reqs{a="b"} 1\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5\n'
    assert read_load(sglang, 7.0) == Load(1.0, 2.0, 0.5, 7.0)


def test_what_is_not_said_is_not_zero() -> None:
    assert read_load("", 1.0) == Load(None, None, None, 1.0)
    nonsense = "\nvllm:num_requests_running NaN\nvllm:num_requests_waiting x\n"
    assert read_load(nonsense, 1.0) == Load(None, None, None, 1.0)


def test_conflicts_are_named_and_what_is_not_known_conflicts_with_nothing() -> None:
    known = Traits("vllm", "0.32.0", "m", 32, "auto")
    assert conflict(known, Traits()) is None
    assert conflict(known, known) is None
    assert conflict(known, Traits(block_size=16)) == "block size 32 against 16"
    assert conflict(known, Traits(model="other")) == "model m against other"
    assert conflict(known, Traits(server="sglang", block_size=16)) == "server vllm against sglang"
