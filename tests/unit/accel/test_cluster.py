"""From wishes to plans on accelerated hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvduplex.accel_cluster import AccelCluster, HostRole, plan_cluster
from kvduplex.cpu_cluster import parse_settings
from kvduplex.errors import UsageError
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.interface import Role


def plan(recipe: str, backend: Any = "neuron", **wishes: Any) -> Any:
    return plan_cluster(AccelCluster(backend=backend, recipe=recipe, address="10.0.1.10", **wishes))


def test_both_roles_on_one_host_stay_on_loopback_with_the_router() -> None:
    planned = plan("llama-3.1-8b-trn2")
    assert [engine.name for engine in planned.plans] == ["prefill-0", "decode-0"]
    assert {engine.url.rsplit(":", 1)[0] for engine in planned.plans} == {"http://127.0.0.1"}
    assert planned.router_here
    assert planned.model_name == "meta-llama/Llama-3.1-8B-Instruct"
    assert planned.ready_timeout_s == 2400


def test_one_role_is_reached_at_this_hosts_address_and_has_no_router() -> None:
    planned = plan("qwen3-32b-p5en", "gpu", role=HostRole.DECODE)
    (engine,) = planned.plans
    assert engine.url == "http://10.0.1.10:8200"
    assert engine.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.1.10"
    assert not planned.router_here
    assert planned.model_name == "Qwen"


def test_a_router_elsewhere_needs_the_address_and_none_starts_here() -> None:
    planned = plan("llama-3.1-8b-trn2", router_elsewhere=True)
    assert not planned.router_here
    assert planned.plans[0].url == "http://10.0.1.10:8100"


def test_an_advertised_address_wins() -> None:
    planned = plan("qwen3-8b-two-gpus", "gpu", advertise="10.9.9.9")
    assert {engine.url for engine in planned.plans} == {"http://10.9.9.9:8100", "http://10.9.9.9:8200"}


def test_replicas_are_all_on_this_host_behind_the_router() -> None:
    planned = plan("llama-3.1-8b-trn1")
    assert len(planned.plans) == 16
    assert planned.router_here
    assert planned.roles == (Role.DECODE,)


def test_settings_of_one_role_and_a_model_folder(tmp_path: Path) -> None:
    planned = plan(
        "llama-3.1-8b-trn2",
        model=str(tmp_path),
        common={"connector": ConnectorKind.LEASED},
        settings=parse_settings(["decode.max_num_seqs=16", "http_port=9000", "decode.http_port=9100"]),
    )
    prefill, decode = planned.plans
    assert decode.argv[decode.argv.index("--max-num-seqs") + 1] == "16"
    assert (prefill.ports["http"], decode.ports["http"]) == (9000, 9100)
    assert decode.lease_endpoint == "tcp://127.0.0.1:5900"
    assert prefill.environment["HF_HUB_OFFLINE"] == "1"
    assert not any("StreamParams" in word for word in decode.argv)


@pytest.mark.parametrize(
    ("recipe", "backend", "wishes", "message"),
    [
        ("qwen3-32b-p5en", "gpu", {}, "needs a host for each role"),
        ("llama-3.1-8b-trn1", "neuron", {"role": HostRole.PREFILL}, "has plain replicas only"),
        ("qwen3-32b", "gpu", {}, "did you mean qwen3-32b-p5"),
        ("llama-3.1-8b-trn2", "neuron", {"settings": parse_settings(["turbo=1"])}, "turbo: unknown key"),
        ("llama-3.1-8b-trn2", "neuron", {"model": ""}, "--model: is empty"),
        ("llama-3.1-8b-trn2", "neuron", {"advertise": "0.0.0.0"}, "peers cannot dial"),
        ("llama-3.1-8b-trn2", "neuron", {"advertise": "http://10.0.1.10"}, "advertised_host: is neither a host"),
        ("llama-3.1-8b-trn2", "neuron", {"advertise": "10.0.1.10:8100"}, "leave out scheme, port and brackets"),
        ("qwen3-8b-two-gpus", "gpu", {"advertise": "[fd00::1]"}, "leave out scheme, port and brackets"),
        ("qwen3-8b-two-gpus", "gpu", {"advertise": " 10.0.1.10"}, "leave out scheme, port and brackets"),
        ("llama-3.1-8b-trn2", "neuron", {"settings": parse_settings(["engines=x"])}, "engines: "),
        ("llama-3.1-8b-trn2", "neuron", {"settings": parse_settings(["engines=0"])}, "engines: .* got 0"),
        ("gpt-oss-20b-trn3", "neuron", {"settings": parse_settings(["side_channel_port=65533"])}, "end beyond 65535"),
    ],
)
def test_wishes_that_do_not_fit_are_refused(recipe: str, backend: str, wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(recipe, backend, **wishes)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("llama-3.1-8b-trn2-sdk2.32", "runs vLLM >=0.24,<0.25, and leases need 0.29 or newer; use `--connector stock`"),
        ("gpt-oss-20b-trn3", "cannot run as NeuronNixlConnector; use connector: stock"),
    ],
)
def test_leases_where_they_cannot_be_are_refused(recipe: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(recipe, common={"connector": ConnectorKind.LEASED})


def test_a_recipe_without_an_upper_version_may_have_leases() -> None:
    planned = plan("qwen3-8b-two-gpus", "gpu", common={"connector": ConnectorKind.LEASED})
    assert "leased" in " ".join(planned.plans[0].argv).lower()
