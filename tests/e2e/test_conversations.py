"""Three-turn conversations through the router over real engines: the same tokens as one plain engine, by reuse."""

from __future__ import annotations

import json
import re
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.rig import Client, Rig, reused

from kvduplex_router.fleet.traits import conflict, read_traits

pytestmark = pytest.mark.engine

Messages = list[dict[str, Any]]


def opening(name: str, lines: int = 40) -> Messages:
    facts = " ".join(f"Item {n} of {name} weighs {n * n + len(name)} grams." for n in range(lines))
    return [{"role": "system", "content": facts}, {"role": "user", "content": "Hello, what do you know?"}]


def next_turn(history: Messages, answer: str, question: str) -> Messages:
    return [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def ask(client: Client, messages: Messages, stream: bool, **fields: Any) -> dict[str, Any]:
    return (client.stream if stream else client.answer)(messages, **fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_three_turns_equal_a_plain_engine_and_reuse_from_the_second(rig: Rig, stream: bool) -> None:
    conversation = f"three-{uuid.uuid4()}"
    messages = opening(conversation)
    for turn in (1, 2, 3):
        before = rig.prefill_metrics()
        got = ask(rig.router, messages, stream, conversation_id=conversation)
        delta = rig.prefill_metrics().since(before)
        expected = rig.plain.answer(messages)
        assert got["token_ids"] == expected["token_ids"], f"turn {turn}"
        assert got["content"] == expected["content"]
        computed = delta.total("vllm:prompt_tokens_by_source_total", source="local_compute")
        if turn == 1:
            assert reused(delta) == 0
        else:
            assert reused(delta) > computed, f"turn {turn} computed {computed} tokens and reused {reused(delta)}"
        messages = next_turn(messages, got["content"], f"And then, after {turn}?")


def test_turns_of_interleaved_conversations_do_not_mix(rig: Rig) -> None:
    names = [f"{letter}-{uuid.uuid4()}" for letter in "ab"]
    histories = {name: opening(name) for name in names}
    for turn in (1, 2):
        for name in names:
            got = rig.router.answer(histories[name], conversation_id=name)
            assert got["token_ids"] == rig.plain.answer(histories[name])["token_ids"], f"{name}, turn {turn}"
            histories[name] = next_turn(histories[name], got["content"], "Go on.")


def edited_start(messages: Messages) -> Messages:
    return [{"role": "system", "content": "Item 0 weighs nothing. " + messages[0]["content"]}, *messages[1:]]


def edited_answer(messages: Messages) -> Messages:
    return [*messages[:2], {"role": "assistant", "content": messages[2]["content"] + " or not"}, *messages[3:]]


def regenerated(messages: Messages) -> Messages:
    return messages[:2]


def compacted(messages: Messages) -> Messages:
    return [messages[0], messages[-1]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("change", [edited_start, edited_answer, regenerated, compacted], ids=lambda f: f.__name__)
def test_changed_history_gives_the_plain_answer(rig: Rig, change: Any, stream: bool) -> None:
    conversation = f"changed-{uuid.uuid4()}"
    messages = opening(conversation)
    first = ask(rig.router, messages, stream, conversation_id=conversation)
    changed = change(next_turn(messages, first["content"], "And then?"))
    got = ask(rig.router, changed, stream, conversation_id=conversation)
    assert got["token_ids"] == rig.plain.answer(changed)["token_ids"]


def test_another_prompt_under_a_used_id_gives_the_plain_answer(rig: Rig) -> None:
    conversation = f"wrong-{uuid.uuid4()}"
    rig.router.answer(opening(conversation), conversation_id=conversation)
    other = opening(f"other-{uuid.uuid4()}")
    before = rig.prefill_metrics()
    got = rig.router.answer(other, conversation_id=conversation)
    assert reused(rig.prefill_metrics().since(before)) == 0
    assert got["token_ids"] == rig.plain.answer(other)["token_ids"]


def test_client_never_sees_transfer_parameters(rig: Rig) -> None:
    conversation = f"clean-{uuid.uuid4()}"
    frames = rig.router.stream(opening(conversation, lines=5), conversation_id=conversation)["frames"]
    assert not [frame for frame in frames if b"kv_transfer_params" in frame or b"remote_" in frame]


def test_decode_engine_keeps_nothing_pinned_for_ever(rig: Rig) -> None:
    """The router's own counters return to zero once every turn has been answered."""
    assert rig.router_metrics().total("kvduplex_router_in_flight") == 0


def told(url: str, path: str) -> str:
    with urllib.request.urlopen(f"{url}{path}", timeout=30) as reply:
        return str(reply.read().decode())


def test_engines_tell_the_router_what_it_compares(rig: Rig) -> None:
    prefill, decode = (
        read_traits(
            models=json.loads(told(url, "/v1/models")),
            version=json.loads(told(url, "/version")),
            exposition=told(url, "/metrics"),
        )
        for url in (rig.cluster.prefill[0], rig.cluster.decode[0])
    )
    for traits in (prefill, decode):
        assert (traits.server, traits.names) == ("vllm", (rig.router.model,))
        assert None not in (traits.version, traits.model, traits.block_size, traits.cache_dtype)
    assert conflict(prefill, decode) is None
    seen = told(rig.cluster.url, "/metrics")
    for name in ("engine_running", "engine_waiting", "engine_kv_usage"):
        assert len(re.findall(rf"^kvduplex_router_{name}{{", seen, re.MULTILINE)) == 2
    assert rig.router_metrics().total("kvduplex_router_engine_incompatible") == 0


def test_engines_expose_what_the_dashboards_ask_for(rig: Rig) -> None:
    exposed = told(rig.cluster.prefill[0], "/metrics")
    folder = Path(__file__).parents[2] / "docs" / "observability"
    asked = (folder / "grafana.json").read_text() + (folder / "alerts.yaml").read_text()
    pattern = r"\bvllm:[a-z0-9_]+" if rig.connector == "stock" else r"\b(?:vllm:|kvduplex_lease_)[a-z0-9_]+"
    names = set(re.findall(pattern, asked))
    assert names
    families = set(re.findall(r"^# TYPE (\S+)", exposed, re.MULTILINE))
    missing = {n for n in names if not {n, re.sub(r"_(total|sum|count|bucket)$", "", n)} & families}
    assert missing == set()
