"""Turn 2 of a long conversation with and without reuse, side by side, as the prefill engine's own metrics saw it.

Two arms alternate in one run over one cluster:

* ``reuse``: turn 2 of a conversation whose turn 1 went through the router, so the decode engine holds its KV;
* ``recompute``: a turn of the same length whose history nobody has seen, so the prefill engine computes all of it. This
  is what a classic one-way pair does on every turn that its prefill engine no longer holds.

The prefill engine's own prefix cache must be off, else it would hold the history itself and hide the difference.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvduplex_bench.cluster import Cluster
from kvduplex_bench.errors import BenchError, UnreachableError
from kvduplex_bench.scrape import Reading, scrape

__all__ = ["Arm", "Summary", "Turn", "as_json", "engine_arguments", "run", "short_turns", "summarise"]

Messages = list[dict[str, str]]

_TIMEOUT_S = 300.0
_ANSWER_TOKENS = 24
_COUNTED_WITHIN_S = 10.0
_POLL_S = 0.01
_FINISHED = "vllm:e2e_request_latency_seconds_count"


class Arm(StrEnum):
    """What happens to turn 2's history."""

    REUSE = "reuse"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Turn:
    """One measured turn, as the prefill engines' metrics saw it.

    Attributes:
        arm: Which arm it belongs to.
        prompt_tokens: Length of the prompt.
        reused_tokens: Prompt tokens that came by external KV transfer.
        bytes_moved: Bytes that NIXL read.
        hop_s: Time of the request inside the prefill engine: queue, transfer and computation.
        computed_tokens: Prompt tokens that were computed.
    """

    arm: Arm
    prompt_tokens: int
    reused_tokens: int
    bytes_moved: int
    hop_s: float
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians of both arms and their ratio.

    Attributes:
        ratio: Median over the pairs of recompute time divided by reuse time; above 1 reuse is faster.
        ratio_low: Smallest of the pairs' ratios.
        ratio_high: Largest of the pairs' ratios.
    """

    pairs: int
    recompute_s: float
    reuse_s: float
    ratio: float
    ratio_low: float
    ratio_high: float


def engine_arguments(tokens: int, connector: str = "") -> list[str]:
    """What ``kvduplex serve`` needs for a cluster that this can measure; no `connector` takes its default."""
    chosen = ["--connector", connector] if connector else []
    return ["--no-prefill-prefix-cache", "--max-model-len", str(max(4096, 2 * tokens)), *chosen]


def short_turns(cluster: Cluster, *, repeats: int, seed: int = 0) -> list[Turn]:
    """First turns of one line: what passing through the prefill engine takes at least, one step of it."""
    driver = _Driver(cluster, random.Random(seed))
    return [driver.measure(Arm.RECOMPUTE, 1) for _ in range(repeats)]


def run(cluster: Cluster, *, tokens: int, repeats: int, seed: int = 0) -> list[Turn]:
    """Measure `repeats` pairs of turns of at least `tokens` prompt tokens; the order inside a pair alternates.

    Raises:
        BenchError: A request failed, or the cluster served other traffic meanwhile.
    """
    driver = _Driver(cluster, random.Random(seed))
    lines = driver.lines_for(tokens)
    # The first transfer between two engines pays for their handshake; neither arm should.
    driver.measure(Arm.REUSE, lines)
    driver.measure(Arm.RECOMPUTE, lines)
    turns = []
    for repeat in range(repeats):
        order = (Arm.REUSE, Arm.RECOMPUTE) if repeat % 2 else (Arm.RECOMPUTE, Arm.REUSE)
        turns += [driver.measure(arm, lines) for arm in order]
    return turns


def summarise(turns: Sequence[Turn]) -> Summary:
    """Compare the arms pair by pair.

    Raises:
        BenchError: The arms have no or different numbers of turns.
    """
    reuse = [turn.hop_s for turn in turns if turn.arm is Arm.REUSE]
    recompute = [turn.hop_s for turn in turns if turn.arm is Arm.RECOMPUTE]
    if not reuse or len(reuse) != len(recompute):
        raise BenchError(f"{len(reuse)} turns with reuse against {len(recompute)} without; nothing to compare")
    ratios = [slow / fast for slow, fast in zip(recompute, reuse, strict=True)]
    return Summary(
        pairs=len(ratios),
        recompute_s=statistics.median(recompute),
        reuse_s=statistics.median(reuse),
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
    )


def as_json(turns: Sequence[Turn], provenance: dict[str, Any]) -> str:
    """Provenance, then every turn, as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in (provenance, *(asdict(turn) for turn in turns)))


class _Driver:
    """Talks to one cluster and reads what its prefill engines say about it."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._model = _get(f"{cluster.url}/v1/models")["data"][0]["id"]

    def lines_for(self, tokens: int) -> int:
        """How many lines of history make a turn of at least `tokens` tokens, counted by the engine's own tokenizer."""
        lines = 8
        while self._count(self._second_turn(self._history(lines), "yes " * _ANSWER_TOKENS)) < tokens:
            lines += max(1, lines // 8)
        return lines

    def measure(self, arm: Arm, lines: int) -> Turn:
        """One turn of an arm, on a history that was never used before."""
        history = self._history(lines)
        conversation = f"smoke-{self._rng.getrandbits(64):x}"
        answer = "yes " * _ANSWER_TOKENS
        if arm is Arm.REUSE:
            first, _ = self._measured(history, conversation)
            answer = first["choices"][0]["message"]["content"]
        reply, delta = self._measured(self._second_turn(history, answer), conversation)
        source = "vllm:prompt_tokens_by_source_total"
        return Turn(
            arm=arm,
            prompt_tokens=int(reply["usage"]["prompt_tokens"]),
            reused_tokens=int(delta.total(source, source="external_kv_transfer")),
            bytes_moved=int(delta.total("vllm:nixl_bytes_transferred_sum")),
            hop_s=delta.total("vllm:e2e_request_latency_seconds_sum"),
            computed_tokens=int(delta.total(source, source="local_compute")),
        )

    def _measured(self, messages: Messages, conversation: str) -> tuple[dict[str, Any], Reading]:
        """One turn through the router, and what it added to the prefill engines' metrics.

        An engine answers before it counts, so the count is waited for.
        """
        before = self._prefill_metrics()
        reply = self._chat(messages, conversation)
        deadline = time.monotonic() + _COUNTED_WITHIN_S
        while (finished := (delta := self._prefill_metrics().since(before)).total(_FINISHED)) < 1:
            if time.monotonic() > deadline:
                raise BenchError(
                    "no prefill engine counted the turn; is --prefill the engine that the router uses, and reuse on?"
                )
            time.sleep(_POLL_S)
        if finished > 1:
            raise BenchError(
                f"the prefill engines finished {finished:.0f} requests during one turn; stop other traffic"
            )
        return reply, delta

    def _prefill_metrics(self) -> Reading:
        readings = [scrape(url) for url in self._cluster.prefill]
        merged = {
            (f"{name}", labels | {("at", str(i))}): v
            for i, r in enumerate(readings)
            for (name, labels), v in r.samples.items()
        }
        return Reading(merged)

    def _history(self, lines: int) -> Messages:
        facts = [f"Item {n} weighs {self._rng.randrange(10**6)} grams." for n in range(lines)]
        return [{"role": "system", "content": " ".join(facts)}, {"role": "user", "content": "Hello!"}]

    @staticmethod
    def _second_turn(history: Messages, answer: str) -> Messages:
        return [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]

    def _count(self, messages: Messages) -> int:
        body = {"model": self._model, "messages": messages}
        return int(_post(f"{self._cluster.prefill[0]}/tokenize", body)["count"])

    def _chat(self, messages: Messages, conversation: str) -> dict[str, Any]:
        body = {
            "model": self._model,
            "messages": messages,
            "conversation_id": conversation,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
        }
        reply: dict[str, Any] = _post(f"{self._cluster.url}/v1/chat/completions", body)
        return reply


def _get(url: str) -> Any:
    return _request(urllib.request.Request(url))  # noqa: S310 - the operator's own URL


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    return _request(urllib.request.Request(url, json.dumps(body).encode(), headers))  # noqa: S310


def _request(request: urllib.request.Request) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:  # noqa: S310
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        raise BenchError(
            f"{request.full_url} answered {error.code}: {error.read(2000).decode(errors='replace')}"
        ) from error
    except OSError as error:
        raise UnreachableError(f"{request.full_url} does not answer ({error})") from error
