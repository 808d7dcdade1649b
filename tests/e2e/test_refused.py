"""Requests that engines refuse: their blocks are free at once, and their conversation loses nothing."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

import pytest
from tests.e2e.rig import Rig, reused
from tests.e2e.test_conversations import next_turn, opening

pytestmark = pytest.mark.engine

SOON_S = 5.0  # vLLM's own timeout is 30 s
LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat by its model": ("/v1/chat/completions", {"max_tokens": "x"}),
    "chat by a rule": ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}),
    "chat by serving": ("/v1/chat/completions", {"min_tokens": 3, "max_tokens": 2}),
    "completions": ("/v1/completions", {"logprobs": -3}),
    "messages": ("/v1/messages", {"max_tokens": 0}),
    "responses": ("/v1/responses", {"text": {"format": {"type": "nonsense"}}}),
}
EARLY: dict[str, dict[str, Any]] = {
    "stop": {"stop": 5},
    "stop in a list": {"stop": [1]},
    "bad_words": {"bad_words": 5},
    "stream_options": {"stream_options": {"include_usage": True}},
    "top_logprobs": {"top_logprobs": 3},
    "tool_choice": {"tool_choice": "required"},
}


def refusal(rig: Rig, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """An engine's error object for a long prompt with these fields."""
    text = opening(f"refused-{uuid.uuid4()}", lines=60)[0]["content"]
    prompt = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}
    body = {"model": rig.router.model, **prompt.get(path, {"messages": [{"role": "user", "content": text}]}), **fields}
    request = urllib.request.Request(
        f"{rig.cluster.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as reply:
        assert reply.code == 400
        error: dict[str, Any] = json.loads(reply.read())["error"]
    return error


def used(rig: Rig) -> float:
    """Part of the prefill engine's KV cache in use during a small request; an idle engine does not count anew."""
    rig.plain.answer([{"role": "user", "content": "Hello"}], max_tokens=1)
    return rig.prefill_metrics().total("vllm:kv_cache_usage_perc")


def falls_to(rig: Rig, rest: float) -> bool:
    """Whether soon no more of the prefill engine's KV cache is in use than was at rest."""
    end = time.monotonic() + SOON_S
    while used(rig) > rest:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def computed(rig: Rig) -> float:
    return rig.prefill_metrics().total("vllm:prompt_tokens_total")


@pytest.mark.parametrize("case", LATE)
def test_a_prompt_that_only_decode_refuses_is_free_at_once(rig: Rig, case: str) -> None:
    rest, before = used(rig), computed(rig)
    path, fields = LATE[case]
    for _ in range(2):
        refusal(rig, path, fields)
    assert computed(rig) > before, "or it was not computed first"
    assert falls_to(rig, rest)


@pytest.mark.parametrize("case", EARLY)
def test_what_one_look_tells_the_prefill_engine_refuses_before_it_computes(rig: Rig, case: str) -> None:
    before = computed(rig)
    assert refusal(rig, "/v1/chat/completions", EARLY[case])["message"]
    assert computed(rig) == before


@pytest.mark.parametrize("fields", [{"stop": 5}, {"max_tokens": "x"}], ids=["by prefill", "by decode"])
def test_a_conversation_goes_on_after_a_refused_turn(rig: Rig, fields: dict[str, Any]) -> None:
    """Refused by the prefill engine the reference is still good; by the decode engine it was used."""
    conversation = f"refused-{uuid.uuid4()}"
    messages = opening(conversation)
    first = rig.router.answer(messages, conversation_id=conversation)
    turn = next_turn(messages, first["content"], "And then?")
    with pytest.raises(urllib.error.HTTPError) as refused:
        rig.router.answer(turn, conversation_id=conversation, **fields)
    refused.value.close()
    before = rig.prefill_metrics()
    got = rig.router.answer(turn, conversation_id=conversation)
    assert got["token_ids"] == rig.plain.answer(turn)["token_ids"]
    assert (reused(rig.prefill_metrics().since(before)) > 0) is ("stop" in fields)
