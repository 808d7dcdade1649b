"""A real engine's KV events: the router's index says what the engine then reports as cached, block for block."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvduplex.folders import Folders
from kvduplex.tinymodel import SIZES, ensure_model
from kvduplex_bench.cluster import free_ports
from kvduplex_bench.scrape import scrape

pytestmark = pytest.mark.engine

BLOCK = 32
BLOCKS = 160
START_S = 240.0
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}


@contextlib.contextmanager
def process(argv: list[str], environment: dict[str, str], log: Path, ready: str) -> Iterator[None]:
    """A program, from when `ready` answers until the end of the block."""
    with (
        log.open("wb") as out,
        subprocess.Popen(
            argv, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        ) as program,
    ):
        try:
            deadline = time.monotonic() + START_S
            while True:
                assert program.poll() is None, log.read_text(errors="replace")[-4_000:]
                assert time.monotonic() < deadline, log.read_text(errors="replace")[-4_000:]
                with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=5):
                    break
                time.sleep(0.25)
            yield
        finally:
            program.terminate()
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                program.kill()


class Router:
    """The router's address, and how much one exchange changed its counts."""

    def __init__(self, url: str) -> None:
        self.url = url

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, int, dict[str, float]]:
        """A greedy turn: the answer, its cached tokens, and what the router had predicted."""
        before = self.counts()
        body = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.loads(reply.read())
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        time.sleep(0.3)  # for events of this turn; the next prediction rests on them
        after = self.counts()
        return answer["choices"][0]["message"]["content"] or "", cached, {k: after[k] - before[k] for k in after}

    def counts(self) -> dict[str, float]:
        reading = scrape(self.url)
        names = ("predicted_tokens", "predicted_tokens_off", "prompts_miscounted")
        return {name: reading.total(f"kvduplex_router_{name}_total") for name in names}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """One real engine with few blocks, and a router that follows its events."""
    folder = tmp_path_factory.mktemp("events")
    cache = Folders.from_environ(os.environ, home=Path.home(), uid=os.getuid()).cache
    model = ensure_model(SIZES["tiny"], cache, report=lambda _: None)
    http, events, replay, listen = free_ports(4)
    settings = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }  # fmt: skip
    engine = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
        "tiny",
        "--host", "127.0.0.1", "--port", str(http), "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK),
        "--max-model-len", "4096", "--num-gpu-blocks-override", str(BLOCKS), "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps(settings), "--distributed-executor-backend",
        "vllm.v1.executor.uniproc_executor.UniProcExecutor", "--no-enable-log-requests",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ]  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "0", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    front = [
        sys.executable, "-m", "kvduplex_router", "--listen", f"127.0.0.1:{listen}", "--policy", "kv_events",
        "--tokenizer", str(model), "--engine",
        f"http://127.0.0.1:{http}#kv_events=127.0.0.1:{events}&kv_replay=127.0.0.1:{replay}",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{listen}"
    with process(engine, environment, folder / "engine.log", f"http://127.0.0.1:{http}/health"):
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


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["the", "of", "and", "to", "in", "a", "is", "that"]) for _ in range(count))


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
