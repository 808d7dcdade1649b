"""Plays turns against a pair and compares every token with an engine that reuses nothing.

Run as a program it prints how many turns came out wrong, by kind, for either connector:
``python -m tests.e2e.leased_play --connector stock --turns 300``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.leased_histories import Histories, Turn
from tests.e2e.leased_pair import EngineError, Pair, started, tiny_model

from kvduplex_transfer.leases.params import ClaimOffer, Retention, prefill_params

BLOCK = 32
THRESHOLD = 64
LOGPROB_TOLERANCE = 2e-3
TIE = 2e-4
"""Below this gap between the two likeliest tokens, rounding decides which one an engine prints."""


@dataclass(frozen=True)
class Outcome:
    """What became of a turn.

    Attributes:
        turn: The turn.
        wrong: Differences from the plain engine; empty when there is none.
        reused: Prompt tokens read from the decode engine.
        reusable: Prompt tokens that could have been.
        content: The answer.
    """

    turn: Turn
    wrong: tuple[str, ...]
    reused: int
    reusable: int
    content: str


@dataclass
class _Handle:
    tokens: list[int]  # whose KV the decode engine holds
    params: dict[str, Any]  # what a stock decode engine handed over
    read: bool = False


@dataclass
class Player:
    """Plays turns one after the other."""

    pair: Pair
    leased: bool = True
    handles: dict[str, _Handle] = field(default_factory=dict)

    def play(self, turn: Turn) -> Outcome:
        if turn.evict:
            self.pair.prefill.post("/reset_prefix_cache", None)
        handle = f"{uuid.uuid4().hex}"
        before = self.pair.prefill.metrics()
        first = self.pair.prefill.chat(turn.messages, max_tokens=1, kv_transfer_params=self._prefill_params(turn))
        delta = self.pair.prefill.metrics().since(before)
        answer = self.pair.decode.chat(
            turn.messages,
            max_tokens=turn.answer_tokens,
            kv_transfer_params={**first["kv_transfer_params"], **Retention(handle, 120).to_params()},
        )
        plain = self.pair.prefill.chat(turn.messages, max_tokens=turn.answer_tokens, cache_salt=uuid.uuid4().hex)
        reused = int(delta.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))
        local = int(delta.total("vllm:prompt_tokens_by_source_total", source="local_cache_hit"))
        reusable = self._reusable(turn, first["prompt_token_ids"], local)
        if turn.claim in self.handles and reused:
            self.handles[turn.claim].read = True
        output = answer["choices"][0]["token_ids"]
        self.handles[handle] = _Handle([*first["prompt_token_ids"], *output[:-1]], answer["kv_transfer_params"])
        wrong = [f"prefill: {fault}" for fault in differences(first, plain, 1)]
        wrong += [f"decode: {fault}" for fault in differences(answer, plain, turn.answer_tokens)]
        self.last_handle = handle
        return Outcome(turn, tuple(wrong), reused, reusable, answer["choices"][0]["message"]["content"])

    def _prefill_params(self, turn: Turn) -> dict[str, Any]:
        if turn.claim is None:
            return prefill_params()
        if self.leased:
            return ClaimOffer(turn.claim, self.pair.lease_endpoint).to_params()
        handle = self.handles.get(turn.claim)
        return {**handle.params, **prefill_params()} if handle else prefill_params()

    def _reusable(self, turn: Turn, prompt: list[int], local: int) -> int:
        handle = self.handles.get(turn.claim or "")
        if handle is None or handle.read:
            return 0
        shared = common_length(handle.tokens, prompt) // BLOCK * BLOCK - local
        return shared if shared >= THRESHOLD else 0


def common_length(mine: list[int], yours: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(mine, yours, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(mine), len(yours)))


def differences(got: dict[str, Any], plain: dict[str, Any], tokens: int) -> list[str]:
    """How `got` differs from `plain` in its first `tokens` tokens."""
    ours, theirs = (reply["choices"][0]["logprobs"]["content"] for reply in (got, plain))
    for position in range(tokens):
        mine, other = ours[position], theirs[position]
        best, second = (entry["logprob"] for entry in other["top_logprobs"][:2])
        if mine["token"] != other["token"]:
            return [] if best - second < TIE else [f"token {position}: {mine['token']!r} for {other['token']!r}"]
        if abs(mine["logprob"] - other["logprob"]) > LOGPROB_TOLERANCE:
            return [f"logprob {position}: {mine['logprob']:.5f} for {other['logprob']:.5f}"]
    return []


def say(line: str) -> None:
    """A line of the program's result."""
    sys.stdout.write(f"{line}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", choices=["leased", "stock"], default="leased")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="one turn a conversation, so that no fault lasts")
    arguments = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="kvduplex-play-"))
    played: Counter[str] = Counter()
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    reused = reusable = 0
    with started(tiny_model(), logs, connector=arguments.connector) as pair:
        began = time.monotonic()
        histories = Histories(arguments.seed, short=arguments.short)
        player = Player(pair, leased=arguments.connector == "leased")
        for _ in range(arguments.turns):
            turn = histories.next()
            played[turn.kind] += 1
            try:
                outcome = player.play(turn)
            except EngineError as error:
                wrong[turn.kind].append(f"error {error}")
                continue
            histories.answered(turn, outcome.content, player.last_handle)
            reused, reusable = reused + outcome.reused, reusable + outcome.reusable
            if outcome.wrong:
                wrong[turn.kind].append("; ".join(outcome.wrong))
        seconds = time.monotonic() - began
        samples = pair.prefill.metrics().samples.items()
        name = "kvduplex_lease_refused_total"
        refused = {dict(labels)["reason"]: value for (sample, labels), value in samples if sample == name}
    for kind, count in sorted(played.items()):
        say(f"{kind:16} {count:4} played {len(wrong[kind]):4} wrong  {wrong[kind][:1]}")
    say(json.dumps({"turns": sum(played.values()), "wrong": sum(map(len, wrong.values())), "seconds": seconds}))
    say(json.dumps({"reused": reused, "reusable": reusable, "logs": str(logs), "refused": refused}))


if __name__ == "__main__":
    main()
