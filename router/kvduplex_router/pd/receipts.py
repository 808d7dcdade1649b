"""What was decided for the last turns and what came of it, for operators. No text of a client's is in it."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from kvduplex_router.pd.request import Receipt

__all__ = ["ReceiptRing", "RouteReceipt", "newest"]

_log = logging.getLogger("kvduplex.router.receipts")
Family = tuple[str, str, str, tuple[str, ...], list[tuple[tuple[str, ...], float]]]


class RouteReceipt(msgspec.Struct, frozen=True):
    """One turn.

    Attributes:
        at: Seconds since the epoch, by the wall clock.
        request_id: Of the turn.
        api: Which.
        workload: Its class.
        plan: The plan taken.
        outcome: ``ok``, or why not.
        engines: Engines asked, in order.
        reason: What decided the pick of the engine that computed the prompt; empty when no policy did.
        prompt_tokens: As counted by the router; 0 when it did not.
        predicted_cached_tokens: What the plan was expected to leave out of computation.
        delivered_cached_tokens: As the engine reported; None when it did not.
        expected_s: Seconds to the first token, as priced; None when plans were not priced.
        delivered_s: As it came; None when nothing shows it.
        runner_up: The plan that came second; None when there was one.
        runner_up_s: Its price.
        regret_s: Seconds by which the turn took longer than the runner-up was priced; 0 when it did not.
    """

    at: float
    request_id: str
    api: str
    workload: str
    plan: str
    outcome: str
    engines: list[str]
    reason: str
    prompt_tokens: int
    predicted_cached_tokens: int
    delivered_cached_tokens: int | None
    expected_s: float | None
    delivered_s: float | None
    runner_up: str | None
    runner_up_s: float | None
    regret_s: float


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[RouteReceipt])


def newest(told: Iterable[bytes], count: int) -> list[dict[str, Any]]:
    """The last `count` receipts of several rings by what each `ReceiptRing.told`, as JSON objects."""
    rings = heapq.merge(*map(_DECODER.decode, told), key=lambda receipt: receipt.at, reverse=True)
    return [msgspec.to_builtins(each) for each in itertools.islice(rings, count)]


class ReceiptRing:
    """The last receipts, and sums over all of them.

    Args:
        kept: Receipts kept.
        wall: Seconds since the epoch.
    """

    def __init__(self, kept: int, *, wall: Callable[[], float] = time.time) -> None:
        self._ring: deque[RouteReceipt] = deque(maxlen=kept)
        self._wall = wall
        self._regret: defaultdict[str, float] = defaultdict(float)
        self._expected: defaultdict[str, float] = defaultdict(float)
        self._delivered: defaultdict[str, float] = defaultdict(float)

    def add(self, api: str, request_id: str, receipt: Receipt) -> None:
        """A turn ended."""
        regret = 0.0
        if receipt.delivered_s is not None and receipt.expected_s is not None:
            self._expected[receipt.plan] += receipt.expected_s
            self._delivered[receipt.plan] += receipt.delivered_s
            if receipt.runner_up_s is not None:
                regret = max(0.0, receipt.delivered_s - receipt.runner_up_s)
                self._regret[receipt.plan] += regret
        if self._ring.maxlen == 0 and not _log.isEnabledFor(logging.DEBUG):
            return
        made = RouteReceipt(
            at=self._wall(), request_id=request_id, api=api, workload=receipt.workload, plan=receipt.plan,
            outcome=receipt.outcome, engines=receipt.engines, reason=receipt.reason, prompt_tokens=receipt.tokens,
            predicted_cached_tokens=receipt.predicted, delivered_cached_tokens=receipt.cached_tokens,
            expected_s=receipt.expected_s, delivered_s=receipt.delivered_s, runner_up=receipt.runner_up,
            runner_up_s=receipt.runner_up_s, regret_s=regret,
        )  # fmt: skip
        self._ring.append(made)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", msgspec.json.encode(made).decode())

    def told(self, count: int) -> bytes:
        """The last `count` receipts, the newest first, as `newest` reads them."""
        return _ENCODER.encode(list(itertools.islice(reversed(self._ring), max(0, count))))

    def families(self) -> Iterator[Family]:
        """For metrics, see `kvduplex_router.telemetry.families`."""
        for name, text, counter in (
            (
                "plan_expected_seconds",
                "Seconds to the first token as plans were priced, by plan taken.",
                self._expected,
            ),
            ("plan_delivered_seconds", "Seconds to the first token of the same turns.", self._delivered),
            ("plan_regret_seconds", "Seconds by which turns took longer than the second plan's price.", self._regret),
        ):
            yield "counter", name, text, ("plan",), [((plan,), value) for plan, value in counter.items()]
