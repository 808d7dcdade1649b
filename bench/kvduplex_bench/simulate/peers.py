"""What other routers do, as far as their documentation and sources say; approximations, and to be called so.

Each is the idea of a policy with its published defaults, over exact knowledge: token counts and cache contents come
from the engines themselves. A measurement of the real program counts for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvduplex_bench.sim.core.sequence import Work
from kvduplex_bench.simulate.clockwork import VirtualEngine
from kvduplex_bench.simulate.fleet import POLICIES, Pick

__all__ = ["PEERS"]

_THRESHOLD: Final = 0.3
_ABSOLUTE: Final = 64
_RELATIVE: Final = 1.5


def _idlest(engines: Sequence[VirtualEngine]) -> VirtualEngine:
    return min(engines, key=lambda engine: engine.in_flight)


def _cache_aware() -> Pick:
    """vllm-router 0.1: the session's worker; else the one last sent the longest beginning; else the idlest."""
    sessions: dict[str, VirtualEngine] = {}
    sent: dict[bytes, VirtualEngine] = {}

    def known(hashes: Sequence[bytes]) -> VirtualEngine | None:
        count = next((i for i, each in enumerate(hashes) if each not in sent), len(hashes))
        return sent[hashes[count - 1]] if count > _THRESHOLD * len(hashes) else None

    def pick(conversation: str, work: Work, engines: Sequence[VirtualEngine]) -> VirtualEngine:
        hashes = _prompt_hashes(work, engines)
        loads = [engine.in_flight for engine in engines]
        if max(loads) - min(loads) > _ABSOLUTE and max(loads) > _RELATIVE * min(loads):
            chosen = _idlest(engines)
        else:
            chosen = sessions.get(conversation) or known(hashes) or _idlest(engines)
        sessions[conversation] = chosen
        sent.update(dict.fromkeys(hashes, chosen))
        return chosen

    return pick


def _token_cost() -> Pick:
    """As Dynamo documents it: prompt tokens still to compute, plus tokens of all that the engine is serving."""

    def pick(_conversation: str, work: Work, engines: Sequence[VirtualEngine]) -> VirtualEngine:
        hashes = _prompt_hashes(work, engines)

        def cost(engine: VirtualEngine) -> int:
            held = len(engine.core.pool.match(hashes)) * engine.core.timing.block_size
            return work.prompt_tokens - held + engine.tokens_to_compute + engine.tokens_in_flight

        return min(engines, key=cost)

    return pick


def _prompt_hashes(work: Work, engines: Sequence[VirtualEngine]) -> Sequence[bytes]:
    return work.hashes[: work.prompt_tokens // engines[0].core.timing.block_size]


PEERS: Final[dict[str, Callable[[], Pick]]] = {
    "consistent hash": POLICIES["session"], "cache aware": _cache_aware, "token cost": _token_cost,
}  # fmt: skip
"""Policies of other routers by name."""
