"""A cluster that cannot be built is refused with key, value, reason and the nearest choice, before any synthesis."""

from __future__ import annotations

from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvduplex_infra.account.cost import machines_of
from kvduplex_infra.cluster import load_cluster
from kvduplex_infra.cluster.file import parse_cluster
from kvduplex_infra.cluster.fit import notes
from kvduplex_infra.errors import ClusterFileError
from kvduplex_infra.names import Names
from kvduplex_infra.node_files import engine_node, engine_plan

CLUSTERS = Path(__file__).parents[3] / "infra-cdk" / "clusters"
NOW = datetime(2026, 12, 1, tzinfo=UTC)
BLOCK = {"kind": "block", "id": "cr-0123456789abcdef0", "zone": "us-east-2b", "ends": "2027-01-15T11:30:00Z"}


@pytest.fixture
def trn2() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CLUSTERS / "trn2.yaml").read_text())
    return values


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ClusterFileError) as caught:
        parse_cluster(values, where="c.yaml", now=NOW)
    return str(caught.value)


def with_key(values: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """A copy of `values` with one dotted key set."""
    changed = deepcopy(values)
    section = changed
    *path, last = key.split(".")
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value
    return changed


IMAGE = "123456789012.dkr.ecr.us-east-2.amazonaws.com/kvduplex-router@sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("router", "told"),
    [
        ({"platform": "ecs"}, "router: platform: ecs needs container.image, REGISTRY/NAME@sha256:DIGEST"),
        ({"container": {"image": IMAGE}}, "router: container belongs to platform: ecs"),
        ({"platform": "ecs", "container": {}}, "router.container.image: missing"),
        (
            {"platform": "ecs", "container": {"image": IMAGE.replace("@sha256:" + "0" * 64, ":latest")}},
            "router.container.image: string should match",
        ),
        (
            {"platform": "ecs", "instance_type": "c7i.large", "container": {"image": IMAGE}},
            "router: instance_type belongs to platform: ec2",
        ),
        (
            {"platform": "ecs", "container": {"image": IMAGE, "vcpus": 3}},
            "vcpus 3: Fargate sells 1, 2, 4, 8, 16; nearest: 2",
        ),
        (
            {"platform": "ecs", "container": {"image": IMAGE, "vcpus": 8, "memory_gib": 62}},
            "memory_gib 62: with 8 vCPUs Fargate sells 16, 20,",
        ),
        (
            {"platform": "ecs", "container": {"image": IMAGE.replace("us-east-2", "us-west-2")}},
            "router.container.image: 123456789012.dkr.ecr.us-west-2.amazonaws.com/kvduplex-router would come from",
        ),
        ({"platform": "ecs", "count": 0, "container": {"image": IMAGE}}, "router.count: input should be greater"),
        ({"platform": "lambda"}, "router.platform: input should be 'ec2' or 'ecs'"),
    ],
)
def test_routers_that_cannot_run_in_containers_are_refused(
    trn2: dict[str, Any], router: dict[str, Any], told: str
) -> None:
    assert told in refusal({**trn2, "router": router})


def test_routers_in_containers_need_no_machines(trn2: dict[str, Any]) -> None:
    values = {**trn2, "router": {"platform": "ecs", "count": 3, "container": {"image": IMAGE}}}
    cluster = parse_cluster(values, where="c.yaml", now=NOW)
    assert machines_of(cluster) == {"trn2.48xlarge": 2}


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_clusters_are_in_order(path: Path) -> None:
    assert load_cluster(path, now=NOW).name.startswith("kvduplex-")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("prefill.instance_type", "p5en.48xlarge", ["prefill.instance_type", "p5en.48xlarge", "trn2.48xlarge"]),
        ("prefill.instance_type", "trn2.3xlarge", ["cannot be routed to a Neuron device", "nearest: trn2"]),
        ("prefill.instance_type", "trn9.huge", ["trn9.huge", "nearest"]),
        ("region", "us-west-2", ["trn2.48xlarge is not listed in region us-west-2", "us-east-2", "us-west-2b"]),
        ("zone", "us-east-2f", ["us-east-2f does not exist", "zones a, b, c"]),
        ("router_zones", ["us-east-2a"], ["router_zones", "two zones"]),
        ("prefill.count", 0, ["prefill.count", "greater than or equal to 1", "got 0"]),
        ("decode.efa_interfaces", 17, ["decode.efa_interfaces: 17", "16"]),
        ("recipe", "gpt-oss-20b", ["recipe: gpt-oss-20b", "llama-3.3-70b-trn2"]),
        ("recipe", "llama-3.1-8b-trn1", ["no prefill/decode split"]),
        ("access", {"mode": "public"}, ["access", "certificate_arn"]),
        ("access", {"allowed_cidrs": ["0.0.0.0/0"]}, ["lets everyone in"]),
        ("keys", {"clients": "none"}, ["keys.clients", "without keys", "generate"]),
        ("model", {"id": "Qwen/Qwen3-8B"}, ["model.source", "Qwen/Qwen3-8B", "s3://"]),
        ("network", {"internet": "none", "endpoints": False}, ["endpoints: false", "Session Manager"]),
        ("model", {"id": "big/model", "parameters_b": 2000}, ["needs 3725 GiB", "leaves 1306 GiB"]),
        ("decode.volume_gib", 150, ["decode.volume_gib: 150 does not hold 132 GiB", "nearest: 182"]),
        ("image", {"ssm_parameter": "/kvduplex/x"}, ["ssm_version", "drifts"]),
        ("prefill.capacity", {**BLOCK, "zone": "us-east-2c"}, ["us-east-2c", "nearest: zone: us-east-2c"]),
        ("prefill.capacity", {**BLOCK, "ends": "2026-12-01T00:29:00Z"}, ["is over", "on_demand"]),
        ("prefil", {}, ["prefil: unknown key, did you mean prefill?"]),
        ("prefill.capcity", {}, ["prefill.capcity: unknown key, did you mean capacity?"]),
        ("budget", {"monthly_usd": 100, "emails": []}, ["budget.emails"]),
        ("router.instance_type", "trn7.large", ["router.instance_type", "trn7.large"]),
    ],
)
def test_misfits_are_refused(trn2: dict[str, Any], key: str, value: object, told: list[str]) -> None:
    message = refusal(with_key(trn2, key, value))
    assert message.startswith("c.yaml: ")
    assert not [part for part in told if part not in message], message


def test_every_misfit_is_told_at_once(trn2: dict[str, Any]) -> None:
    values = with_key(with_key(trn2, "zone", "us-west-2a"), "decode.instance_type", "trn2.3xlarge")
    assert len(refusal(values).splitlines()) >= 3


def test_an_offering_that_ec2_confirmed_overrules_the_table(trn2: dict[str, Any]) -> None:
    values = trn2 | {"region": "eu-north-1", "zone": "eu-north-1a", "router_zones": [], "unlisted_offering": True}
    assert parse_cluster(values, where="c.yaml", now=NOW).region == "eu-north-1"


def test_a_block_that_still_runs_is_taken(trn2: dict[str, Any]) -> None:
    values = with_key(with_key(trn2, "prefill.capacity", BLOCK), "decode.capacity", BLOCK)
    assert parse_cluster(values, where="c.yaml", now=NOW).prefill is not None


def test_layout_b_needs_efa() -> None:
    values = yaml.safe_load((CLUSTERS / "cpu-smoke.yaml").read_text())
    assert "nearest: A" in refusal(with_key(values, "decode.efa_layout", "B"))


def test_unreadable_files_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match=r"cluster files in .*: none"):
        load_cluster(tmp_path / "x.yaml", now=NOW)
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ClusterFileError, match=r"x\.yaml: line 1: not YAML"):
        load_cluster(tmp_path / "x.yaml", now=NOW)


def test_what_is_allowed_and_costs_something_is_noted(trn2: dict[str, Any]) -> None:
    cluster = parse_cluster(trn2, where="c.yaml", now=NOW)
    assert "routers do not share" not in "\n".join(notes(cluster))
    apart = parse_cluster({**trn2, "state": {"enabled": False}}, where="c.yaml", now=NOW)
    told = "\n".join(notes(apart))
    assert "2 routers do not share" in told
    assert "alarms.emails" in told
    quiet = with_key(trn2, "router.count", 1)
    quiet["alarms"] = {"emails": ["ops@example.com"]}
    quiet["budget"] = {"monthly_usd": 1000, "emails": ["ops@example.com"]}
    assert notes(parse_cluster(quiet, where="c.yaml", now=NOW)) == []


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_engine_of_a_shipped_cluster_can_be_planned_on_any_machine(path: Path) -> None:
    cluster = load_cluster(path, now=NOW)
    for role, fleet in cluster.fleets.items():
        plan = engine_plan(engine_node(cluster, role, fleet, Names(cluster.name)), role)
        assert plan.ports["http"] in {8100, 8200}
        assert ("lease" in plan.ports) == (role == "decode" and not cluster.replicas)


def test_a_connector_that_the_recipe_cannot_run_is_refused(trn2: dict[str, Any]) -> None:
    values = trn2 | {"recipe": "gpt-oss-20b-trn2", "model": {**trn2["model"], "id": "openai/gpt-oss-20b"}}
    cluster = parse_cluster(values, where="c.yaml", now=NOW)
    with pytest.raises(ClusterFileError, match="use connector: stock"):
        engine_plan(engine_node(cluster, "decode", cluster.decode, Names(cluster.name)), "decode")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"region: us-east-2\nregion: us-west-2\n", "line 2: not YAML: region is given twice"),
        (b"name: 2026-99-99\n", "line 1: not YAML: month must be in"),
        (b"name: " + b"1" * 6000, "line 1: not YAML"),
        (b"name: " + b"[" * 3000 + b"]" * 3000, "not YAML: nested too deeply"),
        (b"name: caf\xe9\n", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_line(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(ClusterFileError, match=told):
        load_cluster(file, now=NOW)
