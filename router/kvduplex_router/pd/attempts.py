"""What was tried in a turn so far, and what of it is counted and logged."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.pd.hop import HopFailedError
from kvduplex_router.pd.request import TurnRequest
from kvduplex_router.pd.usage import PromptUsage
from kvduplex_router.routing.facts import Facts
from kvduplex_router.routing.picker import PickContext
from kvduplex_router.telemetry.metrics import Metrics

__all__ = ["Accounts", "Attempts"]

_log = logging.getLogger("kvduplex.router.turn")


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

    def note(self, error: HopFailedError) -> None:
        """An engine failed."""
        if not error.stale or self.stale:
            self.failed.add(error.engine.name)
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

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def failure(self, hop: str, request: TurnRequest, error: HopFailedError) -> None:
        """A hop failed by the engine's fault."""
        self._metrics.hop_failures.inc(hop, error.reason)
        _log.warning("turn %s: %s", request.request_id, error)

    def tokens(self, request: TurnRequest, usage: PromptUsage) -> None:
        """The hop that computed the prompt said how long it was."""
        if usage.prompt_tokens is None:
            return
        workload = "default" if request.facts is None else request.facts.workload.name
        self._metrics.prompt_tokens.inc(workload, by=usage.prompt_tokens)
        self._metrics.cached_tokens.inc(workload, by=usage.cached_tokens or 0)

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
