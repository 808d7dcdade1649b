"""The conversations of a router: takes the reference a turn may use, and keeps the one it leaves."""

from __future__ import annotations

import msgspec

from kvduplex_router.clock import Clock
from kvduplex_router.config import ConversationConfig, Reuse
from kvduplex_router.conversations.answer import Answer
from kvduplex_router.conversations.guard import Refusal, stock_refusal
from kvduplex_router.conversations.history import ChatHistory, TextHistory, history_of
from kvduplex_router.conversations.keys import id_key
from kvduplex_router.conversations.ledger import Fate, Ledger, Taken
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind

__all__ = ["Continuation", "Conversations"]


class Continuation(msgspec.Struct):
    """A turn's place in its conversation.

    Attributes:
        key: Where the turn's own reference will be stored; None when nothing could find it.
        history: The request's history, when it was worked out.
        reference: The last turn's reference, taken for this turn alone; None when there is none to use.
        refusal: Why there is none.
        turns: Turns the conversation has had before.
        holder: Decode engine of the last turn, for stickiness, whether or not its KV is used.
        source: Where the reference was taken from.
        spent: The reference may have been used, or is of no more use.
    """

    key: bytes | None
    history: ChatHistory | TextHistory | None = None
    reference: Reference | None = None
    refusal: Refusal | None = None
    turns: int = 0
    holder: str | None = None
    source: bytes | None = None
    spent: bool = False


class Conversations:
    """See the module.

    Args:
        fleet: The engines.
        ledger: Where references and leases are kept.
        reuse: Whether decode engines' KV is reached by leases, by stock parameters or not; ``AUTO`` asks each engine.
        config: Limits.
        clock: Monotonic seconds.
    """

    def __init__(self, *, fleet: Fleet, ledger: Ledger, reuse: Reuse, config: ConversationConfig, clock: Clock) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._reuse = reuse
        self._config = config
        self._clock = clock
        self._any_stock = self._any_leased = False
        fleet.subscribe(self._fleet_changed)

    def _fleet_changed(self, _engine: Engine, _joined: bool) -> None:
        modes = {self.mode(engine) for engine in self._fleet.decode}
        self._any_stock = Reuse.STOCK in modes
        self._any_leased = Reuse.LEASED in modes

    def mode(self, engine: Engine) -> Reuse:
        """``LEASED``, ``STOCK`` or ``OFF`` for a decode engine."""
        if self._reuse is Reuse.AUTO:
            return Reuse.LEASED if engine.address.lease_endpoint else Reuse.STOCK
        return self._reuse

    async def begin(self, *, tenant: str, kind: ApiKind, body: Body, conversation_id: str | None) -> Continuation:
        """Find the conversation that a request continues and take its reference."""
        if self._reuse is Reuse.OFF:
            return Continuation(None, refusal=Refusal.OFF)
        if conversation_id is not None:
            key = id_key(tenant, body.text("model") or "", conversation_id)
            history = history_of(tenant, kind, body) if self._any_stock else None
            return self._judged(Continuation(key, history), await self._ledger.take([key]))
        found = history_of(tenant, kind, body) if self._config.recognise else None
        if not isinstance(found, ChatHistory):
            return Continuation(None, found, refusal=Refusal.FIRST_TURN)
        continuation = Continuation(found.end.digest, found)
        keys = [earlier.digest for earlier in found.earlier]
        if self._any_leased:  # the same request again, for another answer: a lease covers its whole prompt
            keys.insert(0, found.end.digest)
        return self._judged(continuation, await self._ledger.take(keys) if keys else None)

    def keep_lease(self, continuation: Continuation, engine: Engine, lease: str) -> None:
        """Remember a turn whose blocks `engine` holds under `lease`, and renew it while a next turn is likely."""
        if continuation.key is None:
            return
        turns = continuation.turns + 1
        reference = Reference(engine.name, self._clock(), turns, lease=lease)
        self._ledger.put(continuation.key, reference, self._keep_s(turns))

    def keep_params(self, continuation: Continuation, engine: Engine, params: bytes, answer: Answer | None) -> None:
        """Remember a turn of a stock engine; without a digest of its answer nothing is kept."""
        if continuation.key is None or answer is None or continuation.history is None:
            return
        reference = Reference(
            engine.name,
            self._clock(),
            continuation.turns + 1,
            engine.identity,
            params=bytes(memoryview(params)),  # a copy of its length: JSON writers return bytes with room of 4 kB
            history=continuation.history.end,
            answer=answer,
        )
        self._ledger.put(continuation.key, reference, 0.0)

    def put_back(self, continuation: Continuation, reference: Reference | None) -> None:
        """Store a reference again that was taken for a turn and not used, for the conversation's next try."""
        if reference is not None and continuation.source is not None:
            age_s = self._clock() - reference.stored_at
            self._ledger.put_back(continuation.source, reference, max(0.0, self._keep_s(reference.turns) - age_s))

    def release(self, reference: Reference | None) -> None:
        """A reference is no longer of use: its lease is given back."""
        if reference is not None and reference.lease is not None:
            self._ledger.release(reference.engine, reference.lease)

    def release_lease(self, engine: Engine, lease: str) -> None:
        """Give back a lease that no reference will name."""
        self._ledger.release(engine.name, lease)

    def _keep_s(self, turns: int) -> float:
        """How long a lease is renewed after the last of `turns`."""
        return min(self._config.keep_s * turns, self._config.keep_max_s)

    def _judged(self, continuation: Continuation, taken: Taken | None) -> Continuation:
        if taken is None:
            continuation.refusal = Refusal.FIRST_TURN
            return continuation
        reference = taken.reference
        continuation.turns = reference.turns
        continuation.refusal = self._refusal(taken, continuation.history)
        if continuation.refusal is None:
            continuation.reference, continuation.source = reference, taken.key
        else:
            self.release(reference)
        if continuation.refusal is not Refusal.ENGINE_GONE:
            continuation.holder = reference.engine
        return continuation

    def _refusal(self, taken: Taken, history: ChatHistory | TextHistory | None) -> Refusal | None:
        reference = taken.reference
        engine = self._fleet.find(reference.engine)
        if engine is None:
            return Refusal.ENGINE_GONE
        age_s = self._clock() - reference.stored_at
        if reference.lease is not None:
            return self._lease_refusal(taken.fate, age_s, self._keep_s(reference.turns) + self._config.lease_ttl_s)
        if None not in (reference.identity, engine.identity) and reference.identity != engine.identity:
            return Refusal.ENGINE_RESTARTED
        if age_s >= self._config.usable_s:
            return Refusal.EXPIRED
        return stock_refusal(reference, history)

    def _lease_refusal(self, fate: Fate, age_s: float, lives_s: float) -> Refusal | None:
        if fate is Fate.RESTARTED:
            return Refusal.ENGINE_RESTARTED
        if age_s >= min(lives_s, self._config.decoder_kv_blocks_ttl_s):
            return Refusal.EXPIRED
        return Refusal.LEASE_LOST if fate is Fate.LOST else None
