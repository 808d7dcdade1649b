"""What the tests of real engines talk to, and with what."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from kvduplex_bench.cluster import Cluster
from kvduplex_bench.scrape import Reading, scrape

ANSWER_TOKENS = 24
SHORT_TTL_S = 6


@dataclass
class Client:
    """A chat client that talks to one base URL and remembers nothing."""

    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)

    def answer(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One greedy turn, whole; the reply's only choice with ``token_ids``."""
        with self._post(messages, **fields) as reply:
            choice: dict[str, Any] = json.loads(reply.read())["choices"][0]
        return {"content": choice["message"]["content"], "token_ids": choice["token_ids"]}

    def stream(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One greedy turn, streamed; content and ``token_ids`` put together from the chunks."""
        content = ""
        token_ids: list[int] = []
        with self._post(messages, stream=True, **fields) as reply:
            frames = [line[len(b"data: ") :].strip() for line in reply if line.startswith(b"data: ")]
        assert frames[-1] == b"[DONE]"
        for frame in frames[:-1]:
            for choice in json.loads(frame)["choices"]:
                content += choice["delta"].get("content") or ""
                token_ids += choice.get("token_ids") or []
        return {"content": content, "token_ids": token_ids, "frames": frames}

    def _post(self, messages: list[dict[str, Any]], **fields: Any) -> Any:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            **self.extra,
            **fields,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=120)


@dataclass
class Rig:
    """A running cluster, a client of its router, and a client of one engine that reuses nothing."""

    cluster: Cluster
    connector: str
    router: Client
    plain: Client

    def prefill_metrics(self) -> Reading:
        return scrape(self.cluster.prefill[0])

    def router_metrics(self) -> Reading:
        return scrape(self.cluster.url)


def reused(delta: Reading) -> int:
    """Prompt tokens that came over the wire between two readings of a prefill engine."""
    return int(delta.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))
