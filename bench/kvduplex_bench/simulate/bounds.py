"""How good any policy could be: what is left of a trace's times when routing is not in the way.

Two measures. `play_unhindered` is a bound: no router, however good, answers sooner on these engines. `all_knowing` is a
policy that no router can have, for it sees into the engines: what it gains over a real one is what knowing more could.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvduplex_bench.sim.core.sequence import Phase, Work
from kvduplex_bench.sim.core.timing import Timing
from kvduplex_bench.simulate.clockwork import Agenda, VirtualEngine
from kvduplex_bench.simulate.fleet import Outcome, Pick, Player
from kvduplex_bench.traces.model import Conversation, Trace

__all__ = ["all_knowing", "play_unhindered"]

_TYPICAL_ANSWER: Final = 128


def play_unhindered(trace: Trace, timing: Timing, *, rate: float) -> list[Outcome]:
    """Play a trace with every request alone on an engine that holds whatever any engine has ever seen.

    Args:
        trace: What to play.
        timing: The engines.
        rate: Conversations a second; it decides only what was seen before what.
    """
    agenda, seen = Agenda(), set[bytes]()
    size, step_s = timing.block_size, timing.decode_step_s

    def serve(conversation: Conversation, _index: int, work: Work, answered: Callable[[Outcome], None]) -> None:
        asked, prompt = agenda.now, work.prompt_tokens
        usable = work.hashes[: (prompt - 1) // size]
        cached = size * next((i for i, each in enumerate(usable) if each not in seen), len(usable))
        seen.update(work.hashes[: prompt // size])
        ttft_s = timing.prefill_s(prompt, cached)
        e2e_s = ttft_s + (work.output_tokens - 1) * step_s(1, prompt + work.output_tokens / 2)
        outcome = Outcome(conversation.kind, asked, ttft_s, e2e_s, prompt, cached, work.output_tokens)

        def done() -> None:
            seen.update(work.hashes[: (prompt + work.output_tokens - 1) // size])
            answered(outcome)

        agenda.at(asked + e2e_s, done)

    return Player(trace, rate, size, agenda, serve).run()


def all_knowing() -> Pick:
    """Seconds to the first token as they would be, and what those cost others.

    Counted are the rest of the step under way, all prompts ahead as far as they are neither computed nor cached, and
    the request's own. What it computes counts once more, for others wait as long; and so does what its answer will
    be slowed down, at a typical length, by the KV of what the engine is serving.
    """

    def pick(_conversation: str, work: Work, engines: Sequence[VirtualEngine]) -> VirtualEngine:
        def cost(engine: VirtualEngine) -> tuple[float, int]:
            timing = engine.core.timing
            own = _left(engine, work)
            ahead = sum(_left(engine, each) for each in engine.works)
            computing_s = timing.prefill.per_token_s * (ahead + 2 * own)
            slowed_s = timing.decode.per_context_token_s * _TYPICAL_ANSWER * engine.tokens_in_flight
            return engine.step_left_s + computing_s + slowed_s, engine.in_flight

        return min(engines, key=cost)

    return pick


def _left(engine: VirtualEngine, work: Work) -> int:
    """Prompt tokens of `work` that `engine` has yet to begin to compute."""
    if work.phase is Phase.WAITING:
        usable = work.hashes[: (work.prompt_tokens - 1) // engine.core.timing.block_size]
        return work.prompt_tokens - len(engine.core.pool.match(usable)) * engine.core.timing.block_size
    return max(0, work.prompt_tokens - work.computed - engine.computing(work))
