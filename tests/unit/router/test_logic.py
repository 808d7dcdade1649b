"""The pure parts: stores, history chains, admission, breaker, watchdog, metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry, generate_latest

from kvduplex_router.conversations.answer import AnswerCollector, answer_digest
from kvduplex_router.conversations.history import ChatHistory, history_of
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.conversations.store import MemoryStore
from kvduplex_router.fleet.breaker import Breaker, BreakerState
from kvduplex_router.http.watchdog import NEVER, Watchdog
from kvduplex_router.pd.stream_filter import decoded_frames
from kvduplex_router.pd.usage import PromptUsage, with_prompt_usage
from kvduplex_router.requests.apis import CHAT
from kvduplex_router.requests.body import Body
from kvduplex_router.telemetry.instruments import Counter, Histogram


class Stores(RuleBasedStateMachine):
    """A bounded store against a plain dictionary that forgets the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = MemoryStore(max_count=4, max_bytes=4000, max_age_s=10.0, clock=lambda: self.now)
        self.model: dict[bytes, Reference] = {}

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]), size=st.integers(0, 3000))
    def put(self, key: bytes, size: int) -> None:
        reference = Reference("d", self.now, params=b"x" * size)
        displaced = self.store.put(key, reference)
        expected = [self.model.pop(key)] if key in self.model else []
        self.model[key] = reference
        while len(self.model) > 4 or (sum(r.size for r in self.model.values()) > 4000 and len(self.model) > 1):
            expected.append(self.model.pop(next(iter(self.model))))
        assert displaced == expected

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def take(self, key: bytes) -> None:
        assert self.store.take(key) == self.model.pop(key, None)
        assert self.store.take(key) is None

    @rule(seconds=st.floats(0, 8))
    def wait_and_sweep(self, seconds: float) -> None:
        self.now += seconds
        dropped = self.store.sweep()
        old = [key for key, reference in self.model.items() if reference.stored_at <= self.now - 10]
        assert dropped == [self.model.pop(key) for key in old]

    @invariant()
    def counts_agree(self) -> None:
        assert self.store.count == len(self.model)
        assert self.store.held_bytes == sum(reference.size for reference in self.model.values())


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)

TEXTS = st.text(max_size=6)


def history(messages: list[dict[str, Any]], **fields: Any) -> ChatHistory:
    body = Body.parse(json.dumps({"model": "m", "messages": messages, **fields}).encode())
    found = history_of("tenant", CHAT, body)
    assert isinstance(found, ChatHistory)
    return found


@settings(max_examples=30, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5), TEXTS, TEXTS)
def test_a_request_that_extends_another_is_recognised(texts: list[str], answer: str, question: str) -> None:
    first = [{"role": "user", "content": text} for text in texts]
    longer = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    end = history(first).end
    extension = history(longer)
    assert extension.at(len(first)) == end.digest
    assert end in extension.earlier
    assert end not in history([{"role": "user", "content": "?" + texts[0]}, *longer[1:]]).earlier
    assert end not in history(longer, tools=[]).earlier


def test_messages_cannot_run_into_each_other() -> None:
    one = history([{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}])
    other = history([{"role": "user", "content": "a"}, {"role": "user", "content": "bc"}])
    assert one.end.digest != other.end.digest


def streamed(pieces: list[dict[str, Any]], compact: bool) -> AnswerCollector:
    """A collector that was given each delta as a frame."""
    collector = AnswerCollector(decoded_frames)
    for delta in pieces:
        chunk = {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        data = json.dumps(chunk, separators=(",", ":") if compact else None, ensure_ascii=compact)
        collector.frames(f"data: {data}\n\n".encode())
    return collector


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=12),
    st.lists(st.tuples(TEXTS, TEXTS, st.text(max_size=12)), max_size=3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_streamed_answer_equals_the_message_a_client_sends_back(
    content: str, calls: list[tuple[str, str, str]], compact: bool, random: Any
) -> None:
    def cut(text: str) -> list[str]:
        at = random.randint(0, len(text))
        return [text[:at], text[at:]]

    pieces: list[dict[str, Any]] = [{"content": piece} for piece in cut(content)]
    for index, (call_id, name, arguments) in enumerate(calls):
        pieces.append({"tool_calls": [{"index": index, "id": call_id, "function": {"name": name}}]})
        pieces += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in cut(arguments)]
    sent = {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls],
    }
    result = streamed(pieces, compact).result()
    assert result is not None
    assert result.digest == answer_digest(sent)
    assert result.digest != answer_digest({**sent, "content": content + "x"})


@given(st.text(max_size=12))
def test_text_that_looks_like_a_frame_is_only_text(content: str) -> None:
    hostile = content + '","content":"x\\"tool_calls\\u0022'
    result = streamed([{"content": hostile}], True).result()
    assert result is not None
    assert result.digest == answer_digest({"role": "assistant", "content": hostile})


def test_an_answer_with_a_second_choice_is_not_trusted() -> None:
    collector = AnswerCollector(decoded_frames)
    collector.chunk({"choices": [{"index": 1, "delta": {"content": "x"}}]})
    assert collector.result() is None


def test_a_breaker_opens_tries_once_and_closes() -> None:
    now = [0.0]
    breaker = Breaker(failures=2, open_s=10, clock=lambda: now[0])
    breaker.fault()
    breaker.success()
    breaker.fault()
    states = [(breaker.state, breaker.allows)]
    breaker.fault()
    states.append((breaker.state, breaker.allows))
    now[0] = 10.0
    states.append((breaker.state, breaker.allows))
    breaker.attempt()
    states.append((breaker.state, breaker.allows))
    now[0] = 20.0
    breaker.attempt()
    breaker.success()
    states.append((breaker.state, breaker.allows))
    closed, opened = BreakerState.CLOSED, BreakerState.OPEN
    half = BreakerState.HALF_OPEN
    assert states == [(closed, True), (opened, False), (half, True), (opened, False), (closed, True)]


class Item:
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.expired = 0

    def on_deadline(self) -> None:
        self.deadline = NEVER
        self.expired += 1


async def test_the_watchdog_calls_what_is_due_and_rests_when_nothing_is_watched(tools: Any) -> None:
    loop = asyncio.get_running_loop()
    watchdog = Watchdog(tick_s=0.01)
    due, later = Item(loop.time()), Item(loop.time() + 1000)
    for item in (due, later):
        watchdog.add(item)
    await tools.eventually(lambda: due.expired, "it is called")
    assert later.expired == 0
    for item in (due, later):
        watchdog.discard(item)
    await tools.eventually(lambda: not watchdog.ticking, "it rests")
    watchdog.add(Item(NEVER))
    assert watchdog.ticking
    watchdog.close()


def test_instruments_expose_what_was_counted() -> None:
    registry = CollectorRegistry()
    counter = Counter("things", "Things.", "kind")
    histogram = Histogram("seconds", "Seconds.", "hop", bounds=(0.1, 1.0))
    for instrument in (counter, histogram):
        registry.register(instrument)
    counter.inc("a")
    counter.inc("a", by=2)
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value, "p")
    assert registry.get_sample_value("things_total", {"kind": "a"}) == 3
    buckets = [registry.get_sample_value("seconds_bucket", {"hop": "p", "le": le}) for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert registry.get_sample_value("seconds_sum", {"hop": "p"}) == pytest.approx(7.65)
    assert b"things_total" in generate_latest(registry)


@given(st.one_of(st.none(), st.integers(0, 30)), st.integers(0, 20), st.integers(0, 20))
def test_cached_tokens_never_exceed_the_prompt(cached: int | None, read: int, rest: int) -> None:
    raw = json.dumps({"usage": {"input_tokens": rest, "cache_read_input_tokens": read, "output_tokens": 1}}).encode()
    shown = json.loads(with_prompt_usage(raw, PromptUsage(None, cached)))["usage"]
    assert shown["input_tokens"] + shown["cache_read_input_tokens"] == rest + read
    assert shown["cache_read_input_tokens"] == min(cached or 0, rest + read)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3), lambda i: st.dictionaries(st.text(max_size=3), i), max_leaves=6
    )
)
def test_usage_of_any_shape_is_read(value: Any) -> None:
    PromptUsage.parse(value)
    PromptUsage.parse({"prompt_tokens": value, "prompt_tokens_details": value})
