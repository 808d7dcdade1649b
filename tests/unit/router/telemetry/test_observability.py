"""What docs/observability offers works: rules fire when they should, and every metric and label value exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvduplex_connector.recorder import COUNTERS, GAUGES, HISTOGRAMS, LABELLED
from kvduplex_router import errors
from kvduplex_router.conversations.guard import Refusal
from kvduplex_transfer.leases.states import ClaimFailure, RefusalReason

FOLDER = Path(__file__).parents[4] / "docs" / "observability"
RULES = ("recording-rules.yaml", "alerts.yaml")
NAME = re.compile(r"\b(?:[a-z_]+:)?(?:kvduplex|vllm)[_:][a-z0-9_]+(?::[a-z0-9_]+)?")
MATCHER = re.compile(r'(reason|outcome)=~?"([a-z_|]+)"')
SUFFIXES = ("_total", "_bucket", "_sum", "_count")
# Of vLLM 0.32's own metrics; tests/e2e holds these against a running engine.
VLLM = {"vllm:nixl_bytes_transferred", "vllm:num_preemptions"}


def rules() -> Iterator[dict[str, Any]]:
    for name in RULES:
        for group in yaml.safe_load((FOLDER / name).read_text())["groups"]:
            yield from group["rules"]


def dashboard() -> Any:
    return json.loads((FOLDER / "grafana.json").read_text())


def expressions() -> list[str]:
    panels = dashboard()["panels"]
    return [rule["expr"] for rule in rules()] + [t["expr"] for p in panels for t in p.get("targets", ())]


def known(router: Any) -> set[str]:
    families = {family.name for family in router.router.metrics.registry.collect()}
    leases = {f"kvduplex_lease_{name}" for group in (COUNTERS, GAUGES, HISTOGRAMS, LABELLED) for name in group}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    return families | leases | recorded | VLLM


def base(name: str, families: set[str]) -> str:
    return next((name.removesuffix(s) for s in SUFFIXES if name.removesuffix(s) in families), name)


async def test_every_metric_named_is_exposed(make_cluster: Any) -> None:
    router = await make_cluster(state={"url": "valkey://127.0.0.1:9"})
    families = known(router) | {"kvduplex_router_shared_leases"}  # there once the server was reached, see tests of that
    named = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(named) > 30
    assert {name for name in named if base(name, families) not in families} == set()


def test_the_check_itself_notices_a_wrong_name() -> None:
    assert NAME.findall("sum(rate(kvduplex_router_nothing_total[5m])) / vllm:x") == [
        "kvduplex_router_nothing_total",
        "vllm:x",
    ]
    assert base("kvduplex_router_nothing_total", {"kvduplex_router_something"}) == "kvduplex_router_nothing_total"


def test_label_values_that_rules_ask_for_exist() -> None:
    outcomes = {value.reason for value in vars(errors).values() if hasattr(value, "reason")}
    outcomes |= {"connect", "timeout", "broken", "status", "unusable", "broken_stream", "internal", "engine_error"}
    values = {
        "kvduplex_router_reuse_refused_total": set(Refusal),
        "kvduplex_lease_refused_total": {*RefusalReason, *ClaimFailure},
        "kvduplex_router_turns_total": outcomes,
    }
    checked = 0
    for expression in (rule["expr"] for rule in rules()):
        for metric, allowed in values.items():
            for labels in re.findall(metric + r"\{([^}]*)\}", expression):
                for _, wanted in MATCHER.findall(labels):
                    assert set(wanted.split("|")) <= allowed, metric
                    checked += 1
    assert checked >= 4


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    for alert in alerts:
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert {"summary", "action"} <= alert["annotations"].keys()
    names = {alert["alert"] for alert in alerts}
    page = (FOLDER.parent / "observability.md").read_text()
    assert not [name for name in names if name not in page], "every alert is explained"


@pytest.mark.parametrize("arguments", [["check", "rules", *RULES], ["test", "rules", "alerts-test.yaml"]])
def test_promtool_agrees(arguments: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        missing = "promtool is not here; install Prometheus (Debian: apt-get install prometheus)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    done = subprocess.run([promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_panels_are_whole_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["fieldConfig"]["defaults"]["noValue"] == "no data", "missing is shown as missing"
    boxes = [panel["gridPos"] for panel in panels]
    for a, b in combinations(boxes, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
