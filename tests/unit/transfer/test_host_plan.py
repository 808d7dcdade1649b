"""Where the host backend puts its engines: cores, ports, environment, without starting any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.host.options import HostOptions
from kvduplex_transfer.host.plan import engine_cores
from kvduplex_transfer.interface import EnginePlan, Role


@dataclass(frozen=True)
class Recipe:
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = "tiny"
    model: str = "/models/tiny"

    def options(self, role: Role) -> Mapping[str, Any]:
        return self.settings


def plan(role: Role = Role.DECODE, index: int = 0, *, cores: int = 2, **settings: Any) -> EnginePlan:
    return HostBackend(cores=range(cores), interpreter="python").engine_plan(Recipe(settings), role, index)


def test_the_whole_plan_of_a_pair() -> None:
    prefill, decode = plan(Role.PREFILL), plan(Role.DECODE)

    before, _, after = " ".join(decode.argv).partition(" --kv-transfer-config ")
    assert before == (
        "python -m vllm.entrypoints.openai.api_server --model /models/tiny --host 127.0.0.1 --port 8200 "
        "--tensor-parallel-size 1 --dtype float32 --seed 0 --block-size 32 --max-model-len 4096 "
        "--kv-cache-memory-bytes 1073741824 --no-enable-log-requests --enable-prompt-tokens-details --enforce-eager"
        " --enable-prefix-caching"
    )
    assert after.endswith(" --distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor")
    assert decode.environment == {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700",
        "OMP_NUM_THREADS": "1",
        "GOMP_CPU_AFFINITY": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "KMP_BLOCKTIME": "0",
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
        "UCX_LOG_FILE": "stderr",
    }
    assert decode.ports == {"http": 8200, "side_channel": 5700}
    assert prefill.ports == {"http": 8100, "side_channel": 5600}
    assert prefill.environment["GOMP_CPU_AFFINITY"] == "0"
    assert (prefill.url, decode.url) == ("http://127.0.0.1:8100", "http://127.0.0.1:8200")


def test_no_two_engines_of_a_machine_share_a_port() -> None:
    settings = {"prefill_engines": 100, "decode_engines": 100, "connector": "leased"}
    plans = [plan(role, index, cores=4, **settings) for role in Role for index in range(100)]

    ports = [port for item in plans for port in item.ports.values()]
    assert len(set(ports)) == len(ports)
    assert len({item.name for item in plans}) == len(plans)


def test_ports_may_be_moved() -> None:
    moved = plan(
        Role.DECODE, 1, decode_engines=2, http_port=18200, side_channel_port=15700, lease_port=15900, connector="leased"
    )

    assert moved.ports == {"http": 18201, "side_channel": 15701, "lease": 15901}
    assert moved.lease_endpoint == "tcp://127.0.0.1:15901"


@given(prefill=st.integers(1, 8), decode=st.integers(1, 8), each=st.integers(1, 4), spare=st.integers(0, 4))
def test_engines_get_cores_of_their_own_when_there_are_enough(prefill: int, decode: int, each: int, spare: int) -> None:
    options = HostOptions(prefill_engines=prefill, decode_engines=decode, cores_per_engine=each)
    available = [10 + core for core in range((prefill + decode) * each + spare)]

    taken = [
        core
        for role in Role
        for index in range(options.engines(role))
        for core in engine_cores(options, role=role, index=index, available=available)
    ]

    assert len(taken) == len(set(taken)) == (prefill + decode) * each
    assert set(taken) <= set(available)


@given(prefill=st.integers(1, 8), decode=st.integers(1, 8), cores=st.integers(1, 6))
def test_engines_share_cores_evenly_when_there_are_too_few(prefill: int, decode: int, cores: int) -> None:
    options = HostOptions(prefill_engines=prefill, decode_engines=decode)
    taken = [
        core
        for role in Role
        for index in range(options.engines(role))
        for core in engine_cores(options, role=role, index=index, available=range(cores))
    ]

    counts = [taken.count(core) for core in range(cores)]
    assert max(counts) - min(counts) <= 1


def test_several_cores_are_named_to_openmp() -> None:
    environment = plan(Role.DECODE, cores=8, cores_per_engine=3).environment

    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["GOMP_CPU_AFFINITY"] == "3 4 5"


def test_kv_leaves_the_machine_only_when_the_engines_may() -> None:
    assert plan().environment["UCX_NET_DEVICES"] == "lo"
    open_to_all = plan(bind_host="0.0.0.0", advertised_host="10.0.0.5")
    assert open_to_all.environment["UCX_NET_DEVICES"] == "all"
    assert open_to_all.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.5"
    assert open_to_all.url == "http://10.0.0.5:8200"
    assert plan(bind_host="10.0.0.5", network_devices="eth1").environment["UCX_NET_DEVICES"] == "eth1"


def test_a_recipe_may_add_to_the_environment() -> None:
    environment = plan(environment={"OMP_NUM_THREADS": 2, "UCX_TLS": "tcp"}).environment

    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["UCX_TLS"] == "tcp"


def test_a_hub_id_keeps_the_hub() -> None:
    hub = HostBackend(cores=[0]).engine_plan(Recipe(model="Qwen/Qwen3-0.6B"), Role.PREFILL)

    assert "HF_HUB_OFFLINE" not in hub.environment


@pytest.mark.parametrize(
    ("settings", "index", "message"),
    [
        ({"blocksize": 64}, 0, r"recipe tiny, decode: blocksize: unknown key, did you mean block_size\?"),
        ({"block_size": 48}, 0, r"block_size: .*multiple of 32, got 48"),
        ({"kv_space_gib": 0}, 0, r"kv_space_gib: .*greater than 0, got 0"),
        ({"kv_space_gib": float("inf")}, 0, r"kv_space_gib: .*less than or equal to 1048576, got inf"),
        ({}, 1, r"engine index 1 of decode is outside 0\.\.0; raise decode_engines, now 1"),
        ({}, -1, r"engine index -1 of decode"),
        ({"cores_per_engine": 3}, 0, r"cores_per_engine is 3, but this process may use 2 cores; lower it"),
        ({"bind_host": "0.0.0.0"}, 0, r"bind_host '0\.0\.0\.0' is a wildcard.*set advertised_host as well"),
        ({"environment": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "x"}}, 0, r"VLLM_NIXL_SIDE_CHANNEL_HOST is set by typed"),
        ({"http_port": 5700}, 0, r"must differ"),
        ({"http_port": 65535, "decode_engines": 2}, 1, r"port: .*65535"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], index: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(Role.DECODE, index, **settings)


def test_the_same_recipe_gives_the_same_plan() -> None:
    assert plan(connector="leased") == plan(connector="leased")
