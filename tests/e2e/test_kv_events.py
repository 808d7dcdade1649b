"""A real engine's KV events: the router's index says what the engine then reports as cached, block for block."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.events_rig import ENVIRONMENT, Router, events_engine, process, words
from tests.e2e.leased_pair import tiny_model

from kvduplex_bench.cluster import free_ports
from kvduplex_bench.scrape import scrape

pytestmark = pytest.mark.engine

BLOCK = 32
BLOCKS = 160
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """One real engine with few blocks, and a router that follows its events."""
    folder = tmp_path_factory.mktemp("events")
    model = tiny_model()
    http, events, replay, listen = free_ports(4)
    engine = events_engine(model, http, events=events, replay=replay, block=BLOCK, blocks=BLOCKS)
    front = [
        sys.executable, "-m", "kvduplex_router", "--listen", f"127.0.0.1:{listen}", "--policy", "kv_events",
        "--tokenizer", str(model), "--engine",
        f"http://127.0.0.1:{http}#kv_events=127.0.0.1:{events}&kv_replay=127.0.0.1:{replay}",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{listen}"
    with process(engine, ENVIRONMENT, folder / "engine.log", f"http://127.0.0.1:{http}/health"):
        # Something is computed before the router listens, so that it has to be replayed.
        body = {"model": "tiny", "prompt": "earlier " * 200, "max_tokens": 1}
        early = urllib.request.Request(
            f"http://127.0.0.1:{http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(early, timeout=120).close()
        with process(front, {}, folder / "router.log", f"{url}/ready"):
            made = Router(url)
            deadline = time.monotonic() + 30
            while scrape(url).total("kvduplex_router_event_messages_total", what="batches") < 1:
                assert time.monotonic() < deadline, "the earlier events were not replayed"
                time.sleep(0.1)
            yield made


def test_predictions_are_what_the_engine_reports(router: Router) -> None:
    """Several conversations with one system prompt, turn by turn."""
    system = {"role": "system", "content": words(1, 150)}
    histories = [[system, {"role": "user", "content": words(10 + i, 60)}] for i in range(3)]
    seen = 0
    for turn in range(4):
        for i, history in enumerate(histories):
            answer, cached, counts = router.chat(history)
            assert counts["predicted_tokens_off"] == 0, (turn, i, cached, counts)
            assert counts["prompts_miscounted"] == 0
            seen += cached
            history += [{"role": "assistant", "content": answer}, {"role": "user", "content": words(turn, 30)}]
    assert seen > 1_000, "there was something to predict"
    assert scrape(router.url).total("kvduplex_router_events_trusted") == 1


def test_predictions_follow_evictions(router: Router) -> None:
    """A prompt is predicted to be held only as long as the engine holds it."""
    first = [{"role": "user", "content": words(99, 400)}]
    router.chat(first)
    _, cached, counts = router.chat(first)
    assert cached > 300
    assert counts["predicted_tokens_off"] == 0
    for i in range(16):
        _, _, counts = router.chat([{"role": "user", "content": words(200 + i, 500)}])
        assert counts["predicted_tokens_off"] == 0, i
    _, cached, counts = router.chat(first)
    assert cached == 0, "the engine's cache is too small to keep it"
    assert counts["predicted_tokens_off"] == 0
    assert scrape(router.url).total("kvduplex_router_event_blocks_total", what="removed") > 100


def test_prompts_with_tools_salts_and_text_parts_are_counted_as_the_engine_counts_them(router: Router) -> None:
    long = words(5, 200)
    parts = [{"type": "text", "text": long}, {"type": "text", "text": "and more"}]
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "of"}'}}
    cases: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": long}], "tools": [TOOL]},
        {"messages": [{"role": "user", "content": long}], "cache_salt": "pepper"},
        {
            "messages": [
                {"role": "user", "content": long}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "a word"}, {"role": "user", "content": long},
            ]
        },
    ]  # fmt: skip
    for case in cases:
        messages = case.pop("messages")
        router.chat(messages, **case)
        _, cached, counts = router.chat(messages, **case)
        assert counts["prompts_miscounted"] == 0, case
        assert cached > 100, case
        assert counts["predicted_tokens_off"] == 0, case
