"""A decode engine that goes on alone says what a plain engine says, and leaves a lease that the next turn can use."""

from __future__ import annotations

import json
import os
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import running
from tests.e2e.rig import Client, Rig, reused

from kvduplex.folders import Folders
from kvduplex.tinymodel import SIZES, ensure_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A leased pair behind a router that may continue."""
    cache = Folders.from_environ(os.environ, home=Path.home(), uid=os.getuid()).cache
    model = ensure_model(SIZES["tiny"], cache, report=lambda _: None)
    file = tmp_path_factory.mktemp("router") / "router.yaml"
    routing = {"tokenizer": str(model), "plans": ["continue", "pull", "recompute"], "continue_max_tokens": 400}
    file.write_text(json.dumps({"routing": routing}))
    with running("leased", "--router-config", str(file)) as one:
        yield one


def ask(rig: Rig, messages: list[dict[str, Any]], conversation: str) -> tuple[str, list[int], str]:
    """One greedy turn: text, token ids, plan."""
    body = {
        "model": rig.router.model, "messages": messages, "max_tokens": 24, "temperature": 0, "return_token_ids": True,
        "conversation_id": conversation,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{rig.router.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        choice = json.loads(reply.read())["choices"][0]
        return choice["message"]["content"], choice["token_ids"], reply.headers["x-kvduplex-plan"]


def plain(client: Client, messages: list[dict[str, Any]]) -> list[int]:
    tokens: list[int] = client.answer(messages)["token_ids"]
    return tokens


def test_continued_turns_equal_a_plain_engine_and_a_long_one_after_them_is_pulled(rig: Rig) -> None:
    conversation = f"continue-{uuid.uuid4()}"
    facts = " ".join(f"Item {n} weighs {n * n} grams." for n in range(60))
    messages: list[dict[str, Any]] = [{"role": "system", "content": facts}, {"role": "user", "content": "Hello?"}]
    plans = []
    for turn in range(4):
        content, tokens, plan = ask(rig, messages, conversation)
        plans.append(plan)
        assert tokens == plain(rig.plain, messages), f"turn {turn}, plan {plan}"
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"And then, {turn}?"}]
    assert plans == ["recompute", "continue", "continue", "continue"]
    messages[-1] = {"role": "user", "content": facts}
    before = rig.prefill_metrics()
    _, tokens, plan = ask(rig, messages, conversation)
    delta = rig.prefill_metrics().since(before)
    assert plan == "pull"
    assert reused(delta) > 500, "the continued turns left a lease over their blocks"
    assert tokens == plain(rig.plain, messages)
