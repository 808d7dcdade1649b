"""The routing section: every mistake is named with its key, its value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvduplex_router.config import Plan, Policy, build_config
from kvduplex_router.errors import ConfigError

E = ["http://e:8000"]


CLASSES = "routing.classes"
POLICIES = "'least_in_flight', 'round_robin', 'session', 'prefix' or 'kv_events', got 'fastest'"
PLANS = "'continue', 'pull', 'recompute' or 'aggregate', got 'teleport'"
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"policy": "fastest"}, f"routing.policy: .*{POLICIES}"),
    ({"polcy": "prefix"}, "routing.polcy: unknown key; allowed here: boundary, bounded_load, classes"),
    ({"weights": {"overlap": -1}}, "routing.weights.overlap: .*greater than or equal to 0, got '-1'"),
    ({"weights": {"near": 1}}, "routing.weights.near: unknown key; allowed here: home, load, overlap, session"),
    ({"plans": ["pull"]}, "routing.plans: 'recompute' is missing"),
    ({"plans": ["recompute", "teleport"]}, f"routing.plans.1: .*{PLANS}"),
    ({"classes": [{"name": "Chat"}]}, f"{CLASSES}.0.name: .*'Chat'"),
    ({"classes": [{"name": "a"}, {"name": "a"}]}, f"{CLASSES}: name 'a' is taken"),
    ({"classes": [{"name": "default"}]}, f"{CLASSES}: name 'default' is taken"),
    ({"classes": [{"name": "a", "wieghts": {}}]}, f"{CLASSES}.0.wieghts: unknown key; allowed here: boundary, match"),
    ({"classes": [{"name": "a", "match": [{}]}]}, f"{CLASSES}.0.match.0: an empty rule .*give one of api, model"),
    ({"classes": [{"name": "a", "match": [{"path": "/"}]}]}, "match.0.path: unknown key; allowed here: api, model"),
    ({"boundary": "middle"}, "routing.boundary.*'middle'"),
    ({"boundary": 0}, "routing.boundary.*'0'"),
    ({"events": {"max_blocks": 1}}, "routing.events.max_blocks: .*1000, got '1'"),
]


@pytest.mark.parametrize(("routing", "told"), MISTAKES)
def test_mistakes_are_named(routing: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_config(None, engines=E, routing=routing)


def test_places_in_files_are_named_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        "engines: ['http://e:8000']\nrouting:\n  policy: prefix\n  classes:\n    - name: rag\n      unique: 3\n"
    )
    with pytest.raises(ConfigError, match=r"router.yaml:6: routing.classes.0.unique: "):
        build_config(file)


def test_flags_set_single_keys_of_the_section(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("engines: ['http://e:8000']\nrouting: {policy: prefix, min_tokens: 50}\n")
    config = build_config(file, policy="kv_events", tokenizer=tmp_path)
    assert (config.routing.policy, config.routing.min_tokens, config.routing.tokenizer) == (
        Policy.KV_EVENTS,
        50,
        tmp_path,
    )


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("http://e:1#kv_events=e", r"kv_events: 'e' needs a port|kv_events: 'e' is not HOST:PORT"),
        ("http://e:1#kv_replay=e:2", r"kv_replay 'e:2' is given without kv_events"),
        ("http://e:1#lease=e:2&lease=e:3", "fragment 'lease=e:3' is not understood; allowed are parts of #lease="),
        ("http://e:1#", None),
    ],
)  # fmt: skip
def test_parts_of_an_engine(entry: str, told: str | None) -> None:
    if told is None:
        assert build_config(None, engines=[entry]).engines[0].kv_events is None
        return
    with pytest.raises(ConfigError, match=told):
        build_config(None, engines=[entry])


def test_all_parts_of_an_engine_at_once() -> None:
    (engine,) = build_config(None, engines=["http://e:1#lease=e:2&kv_events=[::1]:3&kv_replay=e:4"]).engines
    assert (engine.lease, engine.kv_events, engine.kv_replay) == ("e:2", "[::1]:3", "e:4")


def test_defaults_keep_the_plans_that_need_no_prices() -> None:
    assert set(build_config(None, engines=E).routing.plans) == {Plan.PULL, Plan.RECOMPUTE}
