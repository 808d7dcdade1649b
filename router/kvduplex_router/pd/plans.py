"""Ways to serve a turn, priced in seconds until its first token. Pure: figures in, prices out.

What it costs others counts too: a decode engine that computes a prompt holds up the answers it is generating.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvduplex_router.config import Plan
from kvduplex_router.routing.cost import EngineCost, Work

__all__ = ["Options", "Priced", "Side", "chosen", "price"]

_BETTER_BY: Final = 0.25
_ENOUGH_SAMPLES: Final = 16


class Side(msgspec.Struct, frozen=True):
    """One engine as a plan would meet it.

    Attributes:
        cost: What work costs there.
        held: Prompt tokens it holds already.
        wait_s: Seconds until it begins.
        running: Requests it is decoding.
    """

    cost: EngineCost
    held: int = 0
    wait_s: float = 0.0
    running: int = 0


class Options(msgspec.Struct, frozen=True):
    """What is allowed for a turn.

    Attributes:
        plans: By configuration.
        tokens: Of the prompt.
        pullable: Prompt tokens that a prefill engine could read from the decode engine of the last turn.
        continue_max: Prompt tokens that a decode engine may have to compute in plan ``continue``.
        interference: Seconds that a second of stalled decoding counts, per request.
    """

    plans: frozenset[Plan]
    tokens: int
    pullable: int = 0
    continue_max: int = 1_024
    interference: float = 0.25


class Priced(msgspec.Struct, frozen=True):
    """A plan and its price.

    Attributes:
        plan: Which.
        seconds: Until the first token, others' losses included.
        expected_s: Until the first token.
        cached: Prompt tokens that it leaves out of computation.
        samples: Turns that the price rests on.
    """

    plan: Plan
    seconds: float
    expected_s: float
    cached: int
    samples: int = 0


def price(options: Options, prefill: Side, decode: Side) -> list[Priced]:
    """The plans that are possible, the cheapest first; ``recompute`` is always among them."""
    found = [_hop(Plan.RECOMPUTE, options, prefill, decode, pulled=0)]
    pulled = max(0, options.pullable - prefill.held)
    if Plan.PULL in options.plans and pulled:
        found.append(_hop(Plan.PULL, options, prefill, decode, pulled=pulled))
    rest = options.tokens - decode.held
    if Plan.CONTINUE in options.plans and decode.held and rest <= options.continue_max:
        found.append(_alone(Plan.CONTINUE, options, prefill, decode))
    elif Plan.AGGREGATE in options.plans:
        found.append(_alone(Plan.AGGREGATE, options, prefill, decode))
    return sorted(found, key=lambda each: each.seconds)


def chosen(priced: Sequence[Priced], *, usual: Plan) -> tuple[Priced, Priced | None]:
    """The plan to take and the best of the others.

    The usual plan is left only for one that is clearly cheaper, and to recompute what could be pulled only when both
    prices rest on enough turns: prices are estimates, and habits keep caches warm.
    """
    best = priced[0]
    habit = next((each for each in priced if each.plan is usual), best)
    unsure = best.plan is Plan.RECOMPUTE and best.samples < _ENOUGH_SAMPLES
    if unsure or habit.seconds <= best.seconds * (1 + _BETTER_BY):
        best = habit
    return best, next((each for each in priced if each is not best), None)


def _hop(plan: Plan, options: Options, prefill: Side, decode: Side, *, pulled: int) -> Priced:
    held = min(options.tokens - 1, prefill.held + pulled)
    there = prefill.cost.seconds(Work(max(1, options.tokens - held), pulled=pulled))
    handed = max(0, options.tokens - decode.held)
    back = decode.cost.seconds(Work(1, running=decode.running, pulled=handed))
    seconds = prefill.wait_s + there + decode.wait_s + back
    return Priced(plan, seconds, seconds, held, prefill.cost.samples)


def _alone(plan: Plan, options: Options, prefill: Side, decode: Side) -> Priced:
    held = min(options.tokens - 1, decode.held)
    per_token = max(decode.cost.per_token, prefill.cost.per_token) if decode.cost.guessed else decode.cost.per_token
    computing = per_token * (options.tokens - held)
    expected = decode.wait_s + decode.cost.seconds(Work(0, running=decode.running)) + computing
    return Priced(
        plan, expected + options.interference * decode.running * computing, expected, held, decode.cost.samples
    )
