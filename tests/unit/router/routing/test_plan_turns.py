"""Plans of real turns: leased engines on real sockets, and what the router tells operators of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LONG = "the of and to in a is that for it as was with be by on not he his but " * 40


@pytest.fixture
def make(make_cluster: Any, model: Path, leases: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that starts one prefill and one leased decode engine with routing settings."""
    monkeypatch.setenv("ADMIN_KEY", "admin-key-1")

    async def start(**routing: Any) -> Any:
        cluster = await make_cluster(
            entries=leases.entries,
            routing={"tokenizer": str(model), **routing},
            admin={"key_env": "ADMIN_KEY"},
        )
        leases.script(cluster.d)
        return cluster

    return start


def history(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": LONG}]
    for turn in range(turns):
        messages += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": "Hello there"}]
    return messages[:-1]


async def receipts(cluster: Any) -> list[dict[str, Any]]:
    answer = await cluster.client("/admin/receipts?count=10", headers={"authorization": "Bearer admin-key-1"})
    found: list[dict[str, Any]] = answer.json
    return found


async def test_by_default_a_next_turn_is_pulled_and_the_receipt_says_what_was_expected(make: Any) -> None:
    cluster = await make()
    plans = []
    for turn in (1, 2):
        answer = await cluster.client.chat(messages=history(turn), conversation_id="c", stream=True)
        plans.append(answer.headers["x-kvduplex-plan"])
    assert plans == ["recompute", "pull"]
    newest, first = await receipts(cluster)
    assert (first["plan"], first["runner_up"]) == ("recompute", None)
    assert (newest["plan"], newest["runner_up"], newest["outcome"]) == ("pull", "recompute", "ok")
    assert 0.9 * newest["prompt_tokens"] < newest["predicted_cached_tokens"] < newest["prompt_tokens"]
    assert newest["delivered_cached_tokens"] == 3
    assert newest["delivered_s"] > 0
    assert newest["regret_s"] == max(0.0, newest["delivered_s"] - newest["runner_up_s"])
    assert "question" not in str(newest)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_decode_engine_goes_on_alone_where_that_is_allowed_and_cheaper(
    make: Any, leases: Any, stream: bool
) -> None:
    cluster = await make(plans=["continue", "pull", "recompute"])
    await cluster.client.chat(messages=history(1), conversation_id="c", stream=stream)
    first = cluster.d.bodies[-1]["kv_transfer_params"]["lease"]["id"]
    cluster.d.cached_tokens = 7
    answer = await cluster.client.chat(messages=history(2), conversation_id="c", stream=stream)
    assert answer.headers["x-kvduplex-plan"] == "continue"
    assert len(cluster.p.requests) == 1, "there was no second prefill hop"
    params = cluster.d.bodies[-1]["kv_transfer_params"]
    assert set(params) == {"lease"}, "nothing is read from another engine, and what was generated is kept"
    assert params["lease"]["id"] != first
    if not stream:
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    answer = await cluster.client.chat(messages=history(3), conversation_id="c", stream=stream)
    assert answer.headers["x-kvduplex-plan"] == "continue"


async def test_a_prompt_that_grew_too_much_is_not_continued(make: Any) -> None:
    cluster = await make(plans=["continue", "pull", "recompute"], continue_max_tokens=100)
    await cluster.client.chat(messages=history(1), conversation_id="c")
    grown = [*history(2)[:-1], {"role": "user", "content": LONG}]
    answer = await cluster.client.chat(messages=grown, conversation_id="c")
    assert answer.headers["x-kvduplex-plan"] == "pull"


async def test_a_continued_turn_whose_engine_is_gone_is_computed_elsewhere(make_cluster: Any, make: Any) -> None:
    cluster = await make(plans=["continue", "pull", "recompute"])
    await cluster.client.chat(messages=history(1), conversation_id="c")
    failed = []

    async def refuse(request: Any) -> None:
        failed.append(request.json)
        await request.reply({"error": {"message": "x"}}, 503)

    good, cluster.d.handler = cluster.d.handler, refuse
    assert (await cluster.client.chat(messages=history(2), conversation_id="c")).status == 503
    assert set(failed[0]["kv_transfer_params"]) == {"lease"}
    cluster.d.handler = good
    answer = await cluster.client.chat(messages=history(2), conversation_id="c")
    assert (answer.status, answer.headers["x-kvduplex-plan"]) == (200, "recompute")


async def test_receipts_need_the_admin_key(make: Any) -> None:
    cluster = await make()
    assert (await cluster.client("/admin/receipts")).status == 401
    answer = await cluster.client("/admin/receipts?count=0", headers={"authorization": "Bearer admin-key-1"})
    assert answer.status == 400
