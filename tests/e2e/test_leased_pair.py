"""The leased connector inside real engines: what is read is right, and what is held ends."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from tests.e2e.leased_histories import KINDS, Histories, Messages
from tests.e2e.leased_pair import Engine, Pair, started, tiny_model
from tests.e2e.leased_play import Outcome, Player, differences

from kvduplex_bench.cluster import free_ports
from kvduplex_transfer.leases import messages as wire
from kvduplex_transfer.leases.client import AsyncLeaseClient
from kvduplex_transfer.leases.params import ClaimOffer, Retention, prefill_params

TURNS = int(os.environ.get("KVDUPLEX_TURNS", "300"))
SEED = int(os.environ.get("KVDUPLEX_SEED", "20261"))
PLAY_S = 1.5 * TURNS
"""Ends the play early on a machine too slow for all the turns; it must have seen every kind of turn by then."""
BLOCKS = 600
"""KV blocks of the decode engine: few, so that leases are also reclaimed."""

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600 + 4 * TURNS)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    decode = {"extra_argv": ["--num-gpu-blocks-override", str(BLOCKS)], "connector_extra": {"claim_ttl_s": 5}}
    # A prefill engine keeps blocks that no decode engine fetched for 30 s unless told otherwise.
    prefill = {"connector_extra": {"kv_lease_duration": 6}}
    with started(tiny_model(), tmp_path_factory.mktemp("engines"), prefill=prefill, decode=decode) as pair:
        yield pair


def eventually(check: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def conversation(words: int = 150) -> Messages:
    text = Histories(hash(uuid.uuid4()) & 0xFFFF).text(words)
    return [{"role": "system", "content": f"{uuid.uuid4()} {text}"}, {"role": "user", "content": "Tell me more."}]


def first_turn(pair: Pair, messages: Messages, lease: dict[str, Any], tokens: int = 8) -> Messages:
    """Play a turn whose answer leaves `lease`; returns the next turn's messages."""
    prefill = pair.prefill.chat(messages, max_tokens=1, kv_transfer_params=prefill_params())
    answer = pair.decode.chat(
        messages, max_tokens=tokens, kv_transfer_params={**prefill["kv_transfer_params"], **lease}
    )
    content = answer["choices"][0]["message"]["content"]
    return [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "And then?"}]


def claim(pair: Pair, messages: Messages, lease: str, endpoint: str = "") -> tuple[dict[str, Any], int]:
    """A prefill hop that claims `lease`, with the tokens it read; the engine has nothing cached."""
    evict(pair.prefill)
    before = pair.prefill.metrics()
    params = ClaimOffer(lease, endpoint or pair.lease_endpoint).to_params()
    reply = pair.prefill.chat(messages, max_tokens=1, kv_transfer_params=params)
    return reply, read(pair.prefill, before)


def evict(engine: Engine) -> None:
    """Empty an engine's prefix cache, which refuses while it still holds blocks for somebody."""
    eventually(lambda: engine.metrics().total("vllm:kv_cache_usage_perc") == 0)
    engine.post("/reset_prefix_cache", None)


def read(engine: Engine, before: Any) -> int:
    delta = engine.metrics().since(before)
    return int(delta.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))


def assert_plain(pair: Pair, messages: Messages, reply: dict[str, Any]) -> None:
    plain = pair.prefill.chat(messages, max_tokens=1, cache_salt=uuid.uuid4().hex)
    assert not differences(reply, plain, 1)


def gauge(engine: Engine, name: str) -> float:
    return engine.metrics().total(f"kvduplex_lease_{name}")


def test_turns_of_every_kind_equal_a_plain_engine(pair: Pair) -> None:
    histories, player = Histories(SEED), Player(pair)
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + PLAY_S
    while len(outcomes) < TURNS and time.monotonic() < deadline:
        outcome = player.play(histories.next())
        histories.answered(outcome.turn, outcome.content, player.last_handle)
        outcomes.append(outcome)
    assert not [(outcome.turn.kind, outcome.wrong) for outcome in outcomes if outcome.wrong]
    assert not [outcome for outcome in outcomes if outcome.reused > outcome.reusable]
    reused, reusable = (sum(getattr(outcome, key) for outcome in outcomes) for key in ("reused", "reusable"))
    assert reused > 0.8 * reusable > 20 * len(outcomes), f"{reused} of {reusable} reusable tokens were reused"
    assert set(Counter(outcome.turn.kind for outcome in outcomes)) == KINDS | {"first"}


def test_two_branches_that_claim_at_once_both_read(pair: Pair) -> None:
    lease = uuid.uuid4().hex
    messages = first_turn(pair, conversation(), Retention(lease, 60).to_params())
    evict(pair.prefill)
    before, declined = pair.prefill.metrics(), pair.decode.metrics()
    params = ClaimOffer(lease, pair.lease_endpoint).to_params()
    branches = [[*messages[:-1], {"role": "user", "content": text}] for text in ("Left, then.", "Right, then.")]

    def prefill(branch: Messages) -> dict[str, Any]:
        return pair.prefill.chat(branch, max_tokens=1, kv_transfer_params=params)

    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(prefill, branches))
    for branch, reply in zip(branches, replies, strict=True):
        assert_plain(pair, branch, reply)
    # The engine may have read for one branch before the other one's claim was even sent.
    late = pair.decode.metrics().since(declined).total("kvduplex_lease_declined_total", reason="consumed")
    assert late <= 1
    assert read(pair.prefill, before) >= (2 - late) * 128
    eventually(lambda: gauge(pair.decode, "claimed") == 0)


def test_an_idle_engine_gives_lapsed_blocks_back(pair: Pair) -> None:
    expired = pair.decode.metrics().total("kvduplex_lease_ended_total", state="expired")
    first_turn(pair, conversation(), Retention(uuid.uuid4().hex, 1.0).to_params())
    eventually(lambda: pair.decode.metrics().total("kvduplex_lease_ended_total", state="expired") > expired)


def test_a_client_that_leaves_mid_stream_loses_no_reuse(pair: Pair) -> None:
    messages, lease = conversation(), uuid.uuid4().hex
    prefill = pair.prefill.chat(messages, max_tokens=1, kv_transfer_params=prefill_params())
    params = {**prefill["kv_transfer_params"], **Retention(lease, 60).to_params()}
    body = {"model": "pair", "messages": messages, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    began = gauge(pair.decode, "began_total")
    address = urlsplit(pair.decode.plan.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, "kv_transfer_params": params}),
        {"content-type": "application/json"},
    )
    reply = connection.getresponse()
    for _ in range(10):
        reply.readline()
    connection.close()
    eventually(lambda: gauge(pair.decode, "began_total") > began)
    answered = [*messages, {"role": "user", "content": "You stopped?"}]
    result, tokens = claim(pair, answered, lease)
    assert tokens > 0
    assert_plain(pair, answered, result)


@pytest.mark.parametrize("retention", [Retention.none().to_params(), {}], ids=["keep nothing", "no lease named"])
def test_requests_without_a_lease_pin_nothing(pair: Pair, retention: dict[str, Any]) -> None:
    began = gauge(pair.decode, "began_total")
    first_turn(pair, conversation(), retention)
    assert gauge(pair.decode, "began_total") == began


def test_a_handle_without_a_claim_is_not_read(pair: Pair) -> None:
    """What a stock decode engine would hand over names blocks by number; nothing proves what lies there."""
    messages = conversation()
    before = pair.prefill.metrics()
    forged = {
        **prefill_params(),
        "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7, 8]],
        "remote_engine_id": "anyone",
        "remote_request_id": "any",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_num_tokens": 256,
        "tp_size": 1,
    }
    reply = pair.prefill.chat(messages, max_tokens=1, kv_transfer_params=forged)
    assert read(pair.prefill, before) == 0
    assert_plain(pair, messages, reply)


@pytest.mark.parametrize(
    ("lease", "endpoint", "reason"),
    [
        ("a", "tcp://127.0.0.1:9", "timeout"),
        ("x" * 10_000, "", "malformed"),
        ("a b", "", "malformed"),
        ("a", "nowhere", "malformed"),
    ],
    ids=["nobody answers", "huge id", "odd id", "odd endpoint"],
)
def test_bad_claims_cost_one_counted_recomputation(pair: Pair, lease: str, endpoint: str, reason: str) -> None:
    messages = conversation()
    before = pair.prefill.metrics()
    params = {**prefill_params(), "lease_claim": {"id": lease, "endpoint": endpoint or pair.lease_endpoint}}
    began = time.monotonic()
    reply = pair.prefill.chat(messages, max_tokens=1, kv_transfer_params=params)
    assert time.monotonic() - began < 10
    assert pair.prefill.metrics().since(before).total("kvduplex_lease_refused_total", reason=reason) == 1
    assert_plain(pair, messages, reply)


class Ghost(threading.Thread):
    """A lease endpoint that grants everything and points to an engine that is not there."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.finished: list[wire.Finish] = []
        self._over = threading.Event()

    def run(self) -> None:
        (nowhere,) = free_ports(1)
        source = wire.Source("ghost", "127.0.0.1", nowhere)
        while not self._over.is_set():
            if not self._socket.poll(100):
                continue
            peer, frame = self._socket.recv_multipart()
            match wire.decode_request(frame):
                case wire.Claim(number=number, chain=chain):
                    blocks = list(range(1, 1 + len(chain) // 32))
                    grant = wire.Granted(number, blocks, len(blocks), 30.0, source)
                    self._socket.send_multipart((peer, wire.encode(grant)))
                case wire.Finish() as finish:
                    self.finished.append(finish)

    def close(self) -> None:
        self._over.set()
        self.join(timeout=5)
        self._context.destroy(linger=0)


def test_a_read_that_fails_is_computed_by_the_same_request(pair: Pair) -> None:
    ghost = Ghost()
    ghost.start()
    history = conversation()
    before = pair.prefill.metrics()
    began = time.monotonic()
    reply, _ = claim(pair, history, "any", ghost.endpoint)
    assert time.monotonic() - began < 30
    assert pair.prefill.metrics().since(before).total("kvduplex_lease_refused_total", reason="read_failed") == 1
    eventually(lambda: [finish.consumed for finish in ghost.finished] == [False])
    ghost.close()
    assert_plain(pair, history, reply)


async def test_a_renewed_lease_outlives_one_that_is_not(pair: Pair) -> None:
    kept, left = uuid.uuid4().hex, uuid.uuid4().hex
    messages = first_turn(pair, conversation(), Retention(kept, 4.0).to_params())
    async with AsyncLeaseClient(pair.lease_endpoint, timeout_s=10) as client:
        assert await client.renew([kept], 120) == {kept}
        first_turn(pair, conversation(), Retention(left, 1.0).to_params())
        identity = await client.hello()
        assert identity.engine_id
        assert identity.block_size == 32
        over = time.monotonic() + 1.1  # the time of `left` is what is waited for, and nothing else
        eventually(lambda: time.monotonic() > over)
        assert await client.renew([left, kept], 120) == {kept}
        reply, tokens = claim(pair, messages, kept)
        assert tokens > 0
        assert_plain(pair, messages, reply)
        assert await client.release([kept]) == frozenset(), "it was consumed by the read"


def test_resetting_the_prefix_cache_ends_every_lease(pair: Pair) -> None:
    """After new weights, cached KV is wrong for the same tokens, and block hashes cannot tell."""
    lease = uuid.uuid4().hex
    messages = first_turn(pair, conversation(), Retention(lease, 120).to_params())
    pair.decode.post("/reset_prefix_cache", None)
    reply, tokens = claim(pair, messages, lease)
    assert tokens == 0
    assert_plain(pair, messages, reply)


def test_leases_of_a_former_life_are_unknown(pair: Pair) -> None:
    lease = uuid.uuid4().hex
    messages = first_turn(pair, conversation(), Retention(lease, 120).to_params())
    pair.decode.kill()
    reply, tokens = claim(pair, messages, lease)
    assert tokens == 0
    assert_plain(pair, messages, reply)
    pair.decode.start()
    pair.decode.await_ready()
    reply, tokens = claim(pair, messages, lease)
    assert tokens == 0
    assert_plain(pair, messages, reply)
    again = uuid.uuid4().hex
    following = first_turn(pair, messages, Retention(again, 120).to_params())
    reply, tokens = claim(pair, following, again)
    assert tokens > 0
    assert_plain(pair, following, reply)


def test_logs_hold_no_prompt_and_metrics_no_lease_id(pair: Pair) -> None:
    lease, canary = uuid.uuid4().hex, f"canary{uuid.uuid4().hex}"
    messages = conversation()
    messages[0]["content"] = f"{canary} {messages[0]['content']}"
    claim(pair, first_turn(pair, messages, Retention(lease, 60).to_params()), lease)
    for engine in (pair.prefill, pair.decode):
        assert canary not in engine.log.read_text(errors="replace")
        assert lease not in str(engine.metrics().samples)
