"""Engines killed at random points of a turn and started again: no wrong token, no hang, no pin that stays."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.leased_histories import Histories, Messages
from tests.e2e.leased_pair import Engine, EngineError, Pair, started, tiny_model
from tests.e2e.leased_play import differences

from kvduplex_transfer.leases.params import ClaimOffer, Retention, prefill_params

KILLS = int(os.environ.get("KVDUPLEX_KILLS", "4"))
SEED = int(os.environ.get("KVDUPLEX_SEED", "7"))
LONGEST_HANG_S = 10.0
ANSWER_TOKENS = 12

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240 + 60 * KILLS)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    shorter = {"connector_extra": {"claim_ttl_s": 5, "kv_lease_duration": 6}, "prefix_caching": False}
    logs = tmp_path_factory.mktemp("engines")
    with started(tiny_model(), logs, prefill=shorter, decode={**shorter, "prefix_caching": True}) as pair:
        yield pair


def eventually(check: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def play(pair: Pair, messages: Messages, claim: str | None, lease: str) -> list[tuple[dict[str, Any], int]]:
    """Both hops of a turn, each with the number of tokens it answered; raises what an engine raised."""
    params = ClaimOffer(claim, pair.lease_endpoint).to_params() if claim else prefill_params()
    first = pair.prefill.chat(messages, max_tokens=1, kv_transfer_params=params)
    params = {**first["kv_transfer_params"], **Retention(lease, 5.0).to_params()}
    answer = pair.decode.chat(messages, max_tokens=ANSWER_TOKENS, kv_transfer_params=params)
    return [(first, 1), (answer, ANSWER_TOKENS)]


class Turn(threading.Thread):
    """A turn in a thread of its own, with what it came to and when."""

    def __init__(self, pair: Pair, messages: Messages, claim: str) -> None:
        super().__init__(daemon=True)
        self._arguments = (pair, messages, claim, uuid.uuid4().hex)
        self.replies: list[tuple[dict[str, Any], int]] = []
        self.error: EngineError | None = None
        self.ended_at = 0.0

    def run(self) -> None:
        try:
            self.replies = play(*self._arguments)
        except EngineError as error:
            self.error = error
        self.ended_at = time.monotonic()


def assert_plain(pair: Pair, messages: Messages, replies: list[tuple[dict[str, Any], int]]) -> None:
    plain = pair.prefill.chat(messages, max_tokens=ANSWER_TOKENS)
    for reply, tokens in replies:
        assert not differences(reply, plain, tokens)


def pinned(engine: Engine) -> float:
    reading = engine.metrics()
    return reading.total("kvduplex_lease_blocks_pinned") + reading.total("vllm:kv_cache_usage_perc")


@pytest.mark.parametrize("number", range(KILLS))
def test_a_kill_costs_a_turn_at_most(pair: Pair, number: int) -> None:
    chance = random.Random(SEED * 1000 + number)
    victim = (pair.prefill, pair.decode)[number % 2]
    survivor = pair.decode if victim is pair.prefill else pair.prefill
    system = {"role": "system", "content": f"{uuid.uuid4()} {Histories(number).text(chance.randint(150, 400))}"}
    messages: Messages = [system, {"role": "user", "content": "Begin."}]
    lease = uuid.uuid4().hex
    replies = play(pair, messages, None, lease)
    assert_plain(pair, messages, replies)
    content = replies[1][0]["choices"][0]["message"]["content"]
    messages = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]

    turn = Turn(pair, messages, lease)
    turn.start()
    turn.join(chance.uniform(0.0, 0.5))
    victim.kill()
    killed_at = time.monotonic()
    turn.join(LONGEST_HANG_S + 5)
    assert not turn.is_alive(), f"the turn hangs after {victim.plan.name} was killed"
    assert turn.ended_at - killed_at < LONGEST_HANG_S
    victim.start()
    victim.await_ready()
    if turn.error is None:
        assert_plain(pair, messages, turn.replies)
    assert_plain(pair, messages, play(pair, messages, lease, uuid.uuid4().hex))
    for engine in (survivor, victim):
        eventually(lambda engine=engine: not pinned(engine), 30, f"{engine.plan.name} keeps blocks pinned")  # type: ignore[misc]
