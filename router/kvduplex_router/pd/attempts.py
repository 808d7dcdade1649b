"""What was tried in a turn so far, and what of it is counted and logged."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.pd.hop import HopFailedError
from kvduplex_router.pd.request import TurnRequest
from kvduplex_router.pd.usage import PromptUsage
from kvduplex_router.routing.facts import Facts
from kvduplex_router.routing.picker import PickContext
from kvduplex_router.telemetry.hits import HitDoctor
from kvduplex_router.telemetry.metrics import Metrics

__all__ = ["Accounts", "Attempts"]

_log = logging.getLogger("kvduplex.router.turn")
_OF_THE_SERVER: Final = frozenset({"connect", "timeout", "broken"})
"""Reasons that speak against everything behind the same socket."""


@dataclass(slots=True)
class Attempts:
    """Engines that failed in a turn.

    Attributes:
        failed: Their names; they are not asked again.
        stale: A connection turned out to be closed; the engine behind the first such gets one more chance.
        no_prefill: No prefill engine is left to ask.
        planned: The turn's plan has been made.
        last: The last failure.
    """

    failed: set[str] = field(default_factory=set)
    stale: bool = False
    no_prefill: bool = False
    planned: bool = False
    last: HopFailedError | None = None

    def note(self, error: HopFailedError, ranks: Iterable[Engine] = ()) -> None:
        """An engine failed, and with it the `ranks` of its server when that could not be reached or broke off."""
        if not error.stale or self.stale:
            self.failed.add(error.engine.name)
            if error.reason in _OF_THE_SERVER:
                self.failed.update(each.name for each in ranks)
        self.stale = self.stale or error.stale
        self.last = error

    def forgive(self, engine: Engine) -> None:
        """What failed was perhaps not the engine's fault, and will not be tried again in the same way."""
        self.failed.discard(engine.name)

    def context(self, preferred: str | None = None, facts: Facts | None = None) -> PickContext:
        """What the next choice depends on."""
        return (
            PickContext(preferred, frozenset(self.failed), facts)
            if self.failed
            else PickContext(preferred, facts=facts)
        )


class Accounts:
    """Counts and logs what happens in turns."""

    def __init__(self, metrics: Metrics, doctor: HitDoctor) -> None:
        self._metrics = metrics
        self._doctor = doctor

    def failure(self, hop: str, request: TurnRequest, error: HopFailedError) -> None:
        """A hop failed by the engine's fault."""
        self._metrics.hop_failures.inc(hop, error.reason)
        _log.warning("turn %s: %s", request.request_id, error)

    def refused(self, request: TurnRequest, reason: str) -> None:
        """A turn could not use its last turn's KV."""
        self._metrics.refusals.inc(reason)
        self._doctor.refused(_workload(request), reason)

    def tokens(self, request: TurnRequest, usage: PromptUsage, engine: Engine) -> None:
        """The hop that computed the prompt said how long it was, and how much of it was cached."""
        if usage.prompt_tokens is None or usage.cached_tokens is None:
            return  # not to be told apart from nothing cached
        workload = _workload(request)
        self._metrics.prompt_tokens.inc(workload, by=usage.prompt_tokens)
        self._metrics.cached_tokens.inc(workload, by=usage.cached_tokens)
        self._doctor.counted(workload, usage.prompt_tokens, usage.cached_tokens, _held(request, engine))
        if self._doctor.looks:
            self._doctor.prompts.look(workload, request.tenant, request.kind.history, request.body)

    def compare(self, request: TurnRequest, prefill: PromptUsage, decode: PromptUsage) -> None:
        """Both hops must have rendered the same prompt; that they did not is a fault of the set-up worth an alarm."""
        if None in (prefill.prompt_tokens, decode.prompt_tokens) or prefill.prompt_tokens == decode.prompt_tokens:
            return
        self._metrics.prompt_mismatches.inc()
        _log.error(
            "turn %s: the prefill engine counted %s prompt tokens and the decode engine %s; their chat templates or "
            "models differ, or the template renders tool_choice (set forced_output_on_prefill)",
            request.request_id,
            prefill.prompt_tokens,
            decode.prompt_tokens,
        )


def _workload(request: TurnRequest) -> str:
    return "default" if request.facts is None else request.facts.workload.name


def _held(request: TurnRequest, engine: Engine) -> tuple[int, int] | None:
    """Prompt tokens expected at an engine, and the most expected at any; None when nothing was looked up."""
    facts = request.facts
    if facts is None or facts.prompt is None:
        return None
    here = max(facts.overlaps.get(engine.name, 0), facts.pullable)
    return here, max((here, *facts.overlaps.values()))
