"""A real engine that publishes KV events, a router in front of it, and what the router predicted of each turn."""

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

from kvduplex_bench.scrape import scrape

START_S = 240.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


def events_engine(
    model: Path, http: int, *, events: int, replay: int, block: int, blocks: int, more: tuple[str, ...] = ()
) -> list[str]:
    """The command of an engine that publishes on port `events`, with so many blocks of so many tokens."""
    settings = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }  # fmt: skip
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
        "tiny",
        "--host", "127.0.0.1", "--port", str(http), "--dtype", "float32", "--enforce-eager", "--block-size", str(block),
        "--max-model-len", "4096", "--num-gpu-blocks-override", str(blocks), "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps(settings), "--distributed-executor-backend",
        "vllm.v1.executor.uniproc_executor.UniProcExecutor", "--no-enable-log-requests",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *more,
    ]  # fmt: skip


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

    def __init__(self, url: str, *, model: str = "tiny") -> None:
        self.url = url
        self.model = model

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, int, dict[str, float]]:
        """A greedy turn: the answer, its cached tokens, and what the router had predicted."""
        before = self.counts()
        body = {"model": self.model, "messages": messages, "max_tokens": 20, "temperature": 0, **fields}
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


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["the", "of", "and", "to", "in", "a", "is", "that"]) for _ in range(count))
