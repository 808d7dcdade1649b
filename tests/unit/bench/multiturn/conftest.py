"""A router on a real socket that answers at once, and records of runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest


class ScriptedRouter:
    """Serves a model that says `answer` for whatever it is asked; counts words as tokens.

    Attributes:
        url: Base URL.
        bodies: Chat requests, in order of arrival.
        fail_from: Answers 500 from this chat request on; counted from 0.
        metrics: What `/metrics` shows; None for 404.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.fail_from = 1 << 30
        self.before: Callable[[int], None] = lambda _: None
        self.metrics: str | None = None
        self._known: dict[str, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A client that is stopped leaves in the middle of anything.
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                writer.write(self._answer(head.split(b" ", 2)[1].decode(), body))
                await writer.drain()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, path: str, body: bytes) -> bytes:
        if path == "/v1/models":
            return _whole(200, {"data": [{"id": "m", "max_model_len": 32768}]})
        if path == "/metrics" and self.metrics is not None:
            return _raw(200, "text/plain", self.metrics.encode())
        if path != "/v1/chat/completions":
            return _whole(404, {"error": {"message": "no such path"}})
        return self._chat(json.loads(body))

    def _chat(self, request: dict[str, Any]) -> bytes:
        self.before(len(self.bodies))
        self.bodies.append(request)
        if len(self.bodies) > self.fail_from:
            return _whole(500, {"error": {"message": "the engine is gone"}})
        answer = request.get("max_tokens") or request["max_completion_tokens"]
        prompt = sum(len(json.dumps(message["content"]).split()) for message in request["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": answer}
        if not request["stream"]:
            content = [{"token": "a", "logprob": -0.5, "top_logprobs": []}] * answer
            choice = {"message": {"role": "assistant", "content": "a"}, "logprobs": {"content": content}}
            return _whole(200, {"choices": [choice], "usage": usage})
        conversation = request.get("conversation_id", "")
        cached = self._known.get(conversation, 0)
        self._known[conversation] = prompt
        headers = f"x-kvduplex-plan: {'pull' if cached else 'recompute'}\r\nx-kvduplex-cached-tokens: {cached}\r\n"
        chunks = [{"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "a "}}]}] * answer
        events = [*chunks, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return _raw(200, "text/event-stream", text.encode(), headers)


def _whole(status: int, value: object) -> bytes:
    return _raw(status, "application/json", json.dumps(value).encode())


def _raw(status: int, kind: str, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    """A scripted router that runs in a thread of its own, as a server beside the benchmark does."""
    scripted = ScriptedRouter()
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            ready.set()
            await stop.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(10)
    yield scripted
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def run_lines(*, partial: bool = False) -> list[dict[str, Any]]:
    """A record with known times: off 1 s a thousand tokens, on 0.1 s and 0.01 s a thousand, floor 0.1 s."""
    lines: list[dict[str, Any]] = [
        {
            "kind": "run", "format": 1, "fingerprint": "f", "workload": {"repeats": 3, "conversations": 1},
            "details": {"size": "20m"}, "date": "2026-11-30T03:00:00+00:00", "command": ["python", "bench"],
            "versions": {"kvduplex": "0.1.0", "nixl": "1.5.1"}, "revision": "abc", "host": {"cores": 2, "cpu": "X"},
        }
    ]  # fmt: skip
    times = {"off": (0.0, 1.0), "on": (0.1, 0.01), "floor": (0.1, 0.0)}
    at = 1_000.0
    for setting, arms in {"leased, prefill cache off": ("off", "on"), "leased, prefill cache on": tuple(times)}.items():
        for repeat, prefix, arm in ((r, p, a) for r in range(3) for p in (2_000, 8_000) for a in arms):
            base, slope = times[arm]
            ttft = (base + slope * prefix / 1_000) * (0.9, 1.0, 1.3)[repeat]
            at += ttft
            lines += _segment(setting, arm, prefix, repeat, ttft, at)
    reads = [{"bytes": 8_000_000, "pieces": 10, "seconds": [0.008, 0.004, 0.009]}]
    lines.append({"kind": "bandwidth", "setting": "leased, prefill cache off", "reads": reads})
    return lines if partial else [*lines, {"kind": "end", "complete": True, "missing": 0, "reason": ""}]


def _segment(setting: str, arm: str, prefix: int, repeat: int, ttft: float, at: float) -> list[dict[str, Any]]:
    key = f"{setting}/{arm}/{prefix}/{repeat}"
    pulled = prefix if arm == "on" else 0
    counted = {
        "requests": 1, "prefill_s": ttft * 0.8, "queue_s": ttft * 0.1, "transfer_s": ttft * 0.05 if pulled else 0.0,
        "claim_s": 0.002 if pulled else 0.0, "computed_tokens": prefix + 150 - pulled, "local_tokens": 0,
        "pulled_tokens": pulled, "pulled_bytes": pulled * 1_000, "pulled_pieces": 10 if pulled else 0,
        "pulls": int(bool(pulled)), "handed_bytes": 0, "refused": 0,
    }  # fmt: skip
    turn = {
        "kind": "turn", "segment": key, "conversation": key, "at_s": at, "ttft_s": ttft, "e2e_s": ttft + 1,
        "gaps_s": [0.02, 0.04], "connect_s": 0.001, "prompt_tokens": prefix + 150, "answer_tokens": 3,
        "cached_tokens": pulled, "plan": "pull" if pulled else "recompute",
    }  # fmt: skip
    closing = {
        "kind": "segment", "segment": key, "setting": setting, "arm": arm, "prefix_tokens": prefix, "repeat": repeat,
        "wall_s": 2.0, "client_cpu_s": 0.02, "errors": 0, "counted": counted,
        "compared": {"verdict": "equal", "tokens": 16, "worst_logprob": 1e-6} if arm == "on" and not repeat else None,
    }  # fmt: skip
    return [{**turn, "turn": 0, "counts": False, "ttft_s": 99.0}, {**turn, "turn": 1, "counts": True}, closing]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Writes a record of a run with known times."""

    def write(*, partial: bool = False, drop_last: int = 0) -> Path:
        lines = run_lines(partial=partial)
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines[: len(lines) - drop_last]))
        return path

    return write
