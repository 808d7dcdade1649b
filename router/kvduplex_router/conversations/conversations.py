"""The conversations of a router: takes the reference a turn may use, and keeps the one it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvduplex_router.clock import Clock
from kvduplex_router.config import ConversationConfig, Reuse
from kvduplex_router.conversations.answer import Answer
from kvduplex_router.conversations.guard import Refusal, stock_refusal
from kvduplex_router.conversations.history import ChatHistory, TextHistory, history_of
from kvduplex_router.conversations.keys import id_key
from kvduplex_router.conversations.leases import HeldLease, LeaseKeeper
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.conversations.store import Store
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind

__all__ = ["Continuation", "Conversations"]


@dataclass(slots=True)
class Continuation:
    """A turn's place in its conversation.

    Attributes:
        key: Where the turn's own reference will be stored; None when nothing could find it.
        history: The request's history, when it was worked out.
        reference: The last turn's reference, taken for this turn alone; None when there is none to use.
        refusal: Why there is none.
        turns: Turns the conversation has had before.
        holder: Decode engine of the last turn, for stickiness, whether or not its KV is used.
    """

    key: bytes | None
    history: ChatHistory | TextHistory | None = None
    reference: Reference | None = None
    refusal: Refusal | None = None
    turns: int = 0
    holder: str | None = None


class Conversations:
    """See the module.

    Args:
        reuse: Whether decode engines' KV is reached by leases, by stock parameters or not; ``AUTO`` asks each engine.
    """

    def __init__(
        self, *, fleet: Fleet, store: Store, keeper: LeaseKeeper, reuse: Reuse, config: ConversationConfig, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._keeper = keeper
        self._reuse = reuse
        self._config = config
        self._clock = clock

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
            return await self._judge(Continuation(key), await self._store.take(key), tenant, kind, body)
        history = history_of(tenant, kind, body) if self._config.recognise else None
        if not isinstance(history, ChatHistory):
            return Continuation(None, history, refusal=Refusal.FIRST_TURN)
        continuation = Continuation(history.end.digest, history)
        return await self._judge(continuation, await self._recognise(history), tenant, kind, body)

    async def keep_lease(self, continuation: Continuation, engine: Engine, lease: str) -> None:
        """Remember a turn whose blocks `engine` holds under `lease`, and renew it while a next turn is likely."""
        endpoint = engine.address.lease_endpoint
        if continuation.key is None or endpoint is None:
            return
        turns = continuation.turns + 1
        await self._put(continuation.key, self._reference(engine, turns, lease=lease))
        until = self._clock() + min(self._config.keep_s * turns, self._config.keep_max_s)
        self._keeper.hold(HeldLease(lease, endpoint, until))

    async def keep_params(
        self, continuation: Continuation, engine: Engine, params: bytes, answer: Answer | None
    ) -> None:
        """Remember a turn of a stock engine; without a digest of its answer nothing is kept."""
        if continuation.key is None or answer is None or continuation.history is None:
            return
        end = continuation.history.end
        turns = continuation.turns + 1
        await self._put(continuation.key, self._reference(engine, turns, params=params, history=end, answer=answer))

    def release(self, reference: Reference | None) -> None:
        """A reference is no longer of use: its lease is given back."""
        if reference is None or reference.lease is None:
            return
        engine = self._fleet.find(reference.engine)
        if engine is not None:
            self.release_lease(engine, reference.lease)

    def release_lease(self, engine: Engine, lease: str) -> None:
        """Give back a lease that no reference will name."""
        if engine.address.lease_endpoint is not None:
            self._keeper.release(lease, engine.address.lease_endpoint)

    async def sweep_forever(self, interval_s: float = 5.0) -> None:
        """Drop what is too old, with or without traffic, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self._release_all(await self._store.sweep())

    async def _recognise(self, history: ChatHistory) -> Reference | None:
        for earlier in history.earlier:
            if (reference := await self._store.take(earlier.digest)) is not None:
                return reference
        return None

    async def _judge(
        self, continuation: Continuation, reference: Reference | None, tenant: str, kind: ApiKind, body: Body
    ) -> Continuation:
        if continuation.history is None and self._needs_history(reference):
            continuation.history = history_of(tenant, kind, body)
        if reference is None:
            continuation.refusal = Refusal.FIRST_TURN
            return continuation
        continuation.turns = reference.turns
        continuation.refusal = self._refusal(reference, continuation.history)
        if continuation.refusal is None:
            continuation.reference = reference
        else:
            self.release(reference)
        if continuation.refusal is not Refusal.ENGINE_GONE:
            continuation.holder = reference.engine
        return continuation

    def _needs_history(self, reference: Reference | None) -> bool:
        stock_taken = reference is not None and reference.lease is None
        return stock_taken or any(self.mode(engine) is Reuse.STOCK for engine in self._fleet.decode)

    def _refusal(self, reference: Reference, history: ChatHistory | TextHistory | None) -> Refusal | None:
        engine = self._fleet.find(reference.engine)
        if engine is None:
            return Refusal.ENGINE_GONE
        if engine.generation != reference.generation:
            return Refusal.ENGINE_RESTARTED
        age = self._clock() - reference.stored_at
        if reference.lease is not None:
            held = self._keeper.let_go(reference.lease)
            return Refusal.LEASE_LOST if not held else Refusal.EXPIRED if self._lease_over(age) else None
        if age >= self._config.reference_ttl_s:
            return Refusal.EXPIRED
        return stock_refusal(reference, history)

    def _lease_over(self, age_s: float) -> bool:
        return age_s >= self._config.decoder_kv_blocks_ttl_s

    def _reference(self, engine: Engine, turns: int, **what: Any) -> Reference:
        return Reference(engine.name, engine.generation, self._clock(), turns, **what)

    async def _put(self, key: bytes, reference: Reference) -> None:
        self._release_all(await self._store.put(key, reference))

    def _release_all(self, references: Iterable[Reference]) -> None:
        for reference in references:
            self.release(reference)
