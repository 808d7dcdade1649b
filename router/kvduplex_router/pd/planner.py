"""Chooses the plan of a turn that could be split, by price."""

from __future__ import annotations

from collections.abc import Sequence

from kvduplex_router.config import Plan, RoutingConfig
from kvduplex_router.conversations.conversations import Continuation
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.pd.plans import Options, Priced, Side, chosen, price
from kvduplex_router.pd.request import Receipt
from kvduplex_router.routing.facts import Facts
from kvduplex_router.routing.service import RoutingService

__all__ = ["Planner"]

_NOBODY: frozenset[str] = frozenset()


class Planner:
    """See the module; without a tokenizer nothing is priced, and the usual plan is taken.

    Args:
        config: The section.
        routing: What is known of engines.
    """

    def __init__(self, config: RoutingConfig, routing: RoutingService) -> None:
        self._plans = frozenset(config.plans)
        self._continue_max = config.continue_max_tokens
        self._interference = config.interference
        self._routing = routing

    def plan(
        self,
        facts: Facts | None,
        continuation: Continuation,
        *,
        decode: Engine,
        prefill: Sequence[Engine],
        receipt: Receipt,
        alone: bool,
    ) -> Plan:
        """The plan for a turn; what it rests on goes into the receipt.

        Args:
            facts: The request's.
            continuation: Its place in its conversation; the reference is dropped when the plan does not use it.
            decode: The engine that will answer.
            prefill: Engines that could compute the prompt for it.
            receipt: The turn's.
            alone: Whether the decode engine can do the whole turn and keep its KV findable.
        """
        reference = continuation.reference
        usual = Plan.RECOMPUTE if reference is None else Plan.PULL
        if facts is None or facts.prompt is None or not facts.prompt.exact:
            return usual
        earlier = 0 if continuation.holder is None else facts.prompt.boundary("previous_turn") or 0
        facts.pullable = 0 if reference is None else min(earlier, facts.tokens - 1)
        options = Options(
            plans=self._plans if alone else self._plans - {Plan.CONTINUE, Plan.AGGREGATE},
            tokens=facts.tokens,
            pullable=facts.pullable,
            continue_max=self._continue_max,
            interference=self._interference,
        )
        computing = self._routing.picker.choose(prefill, facts, _NOBODY)
        if computing is None:
            return usual
        held = max(facts.overlaps.get(decode.name, 0), earlier if decode.name == continuation.holder else 0)
        priced = price(options, self._side(computing.engine, computing.overlap), self._side(decode, held))
        best, runner_up = chosen(priced, usual=usual)
        if best.plan is not Plan.PULL:
            continuation.reference = None
            facts.pullable = 0
        _note(receipt, best, runner_up)
        return best.plan

    def _side(self, engine: Engine, held: int) -> Side:
        desk = self._routing.desks.of(engine)
        return Side(desk.prices, held, desk.wait_s(engine), max(0, engine.in_flight - desk.pending))


def _note(receipt: Receipt, best: Priced, runner_up: Priced | None) -> None:
    receipt.expected_s = best.expected_s
    receipt.predicted = best.cached
    if runner_up is not None:
        receipt.runner_up = runner_up.plan.value
        receipt.runner_up_s = runner_up.expected_s
