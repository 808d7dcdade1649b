"""One turn: take the conversation's reference, let a prefill engine compute the prompt, let a decode engine answer.

A turn is tried again only while nothing of it was consumed: another prefill engine, without the reference; another
decode engine with the same blocks when the first could not be reached, with fresh ones otherwise; never after the
client has been sent a byte.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

import msgspec
import orjson

from kvduplex_router.clock import Clock
from kvduplex_router.config import OnNoPrefill, Plan, Reuse
from kvduplex_router.conversations.conversations import Continuation, Conversations
from kvduplex_router.errors import EngineAnswerError, UnavailableError
from kvduplex_router.fleet.engine import Engine, EngineRole
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.pd.attempts import Accounts, Attempts
from kvduplex_router.pd.client_view import client_error, response_headers
from kvduplex_router.pd.decode import Answered, AnswerHop
from kvduplex_router.pd.hop import HopFailedError
from kvduplex_router.pd.params import UnusableParamsError, checked_params, merged_params
from kvduplex_router.pd.planner import Planner
from kvduplex_router.pd.prefill import Prefilled, PrefillHop
from kvduplex_router.pd.request import Receipt, Sink, TurnRequest
from kvduplex_router.pd.shape import decode_body, whole_body
from kvduplex_router.pd.unread import UnreadBlocks
from kvduplex_router.pd.whole import WholeTurn
from kvduplex_router.routing.admission import Admission, Seat
from kvduplex_router.routing.service import RoutingService
from kvduplex_router.telemetry.metrics import Metrics
from kvduplex_transfer.leases.params import ClaimOffer, Retention, new_lease_id, prefill_params

__all__ = ["TurnPolicy", "TurnRunner"]

_FRESH: Final = orjson.dumps(prefill_params())
_NOTHING_READ: Final = frozenset({400, 404, 413, 422})
"""Statuses with which an engine refuses a request before it looks at transfer parameters; others may come from
something on the way that had passed the request on."""
_log = logging.getLogger("kvduplex.router.turn")


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """The settings a turn depends on.

    Attributes:
        on_no_prefill: What to do without a prefill engine.
        retries: Further attempts.
        prefill_ttl_s: Age at which a prefill engine's blocks are no longer handed on.
        lease_ttl_s: Seconds a lease lives from its last renewal.
    """

    on_no_prefill: OnNoPrefill
    retries: int
    prefill_ttl_s: float
    lease_ttl_s: float


class TurnRunner:
    """Runs turns over a fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        admission: Admission,
        conversations: Conversations,
        prefill: PrefillHop,
        answer: AnswerHop,
        whole: WholeTurn,
        accounts: Accounts,
        metrics: Metrics,
        policy: TurnPolicy,
        clock: Clock,
        routing: RoutingService,
        planner: Planner,
        unread: UnreadBlocks,
    ) -> None:
        self._planner = planner
        self._unread = unread
        self._routing = routing
        self._fleet = fleet
        self._admission = admission
        self._conversations = conversations
        self._prefill = prefill
        self._answer = answer
        self._whole = whole
        self._accounts = accounts
        self._metrics = metrics
        self._policy = policy
        self._clock = clock

    async def run_beside(self) -> None:
        """What goes on beside turns, until cancelled."""
        await self._unread.run()

    async def run(self, request: TurnRequest, sink: Sink, receipt: Receipt) -> None:
        """Answer a request.

        Args:
            request: The turn.
            sink: The client.
            receipt: Filled in as the turn goes on, so that it is right whichever way the turn ends.

        Raises:
            RouterError: No answer; nothing was sent to the client.
            BrokenStreamError: The answer broke off; the client was told so.
        """
        facts = await self._routing.facts(
            request.kind,
            request.body,
            tenant=request.tenant,
            conversation_id=request.conversation_id,
            named=request.workload,
        )
        request = msgspec.structs.replace(request, facts=facts)
        receipt.workload, receipt.tokens = facts.workload.name, facts.tokens
        if not self._fleet.disaggregated:
            await self._whole.run(request, sink, receipt, plan="replica")
        elif (reason := request.kind.whole_because(request.body)) is not None:
            receipt.detail = reason
            await self._whole.run(request, sink, receipt, plan="aggregate")
        else:
            await self._split(request, sink, receipt)

    async def _split(self, request: TurnRequest, sink: Sink, receipt: Receipt) -> None:
        continuation = await self._conversations.begin(
            tenant=request.tenant,
            kind=request.kind,
            body=request.body,
            conversation_id=request.conversation_id,
        )
        taken = continuation.reference
        answered = False
        try:
            await self._attempts(request, sink, receipt, continuation)
            answered = True
        finally:
            if continuation.refusal is not None:
                self._accounts.refused(request, continuation.refusal.value)
            if answered or continuation.spent:
                self._conversations.release(taken)
            else:
                self._conversations.put_back(continuation, taken)

    async def _attempts(self, request: TurnRequest, sink: Sink, receipt: Receipt, continuation: Continuation) -> None:
        tried = Attempts()
        prefilled: Prefilled | None = None
        for _ in range(self._policy.retries + 1):
            seat = await self._seat_decode(continuation, tried)
            try:
                if self._alone(request, receipt, continuation, seat.engine, tried):
                    await self._decode(request, sink, receipt, continuation, seat, None)
                    return
                if prefilled is None or self._stale(prefilled) or not self._fleet.fits(prefilled.engine, seat.engine):
                    prefilled = await self._prefill_once(request, receipt, continuation, seat.engine, tried)
                if prefilled is not None:
                    await self._decode(request, sink, receipt, continuation, seat, prefilled)
                    return
            except HopFailedError as error:
                self._failed("decode", request, error, tried)
                if error.consumed:
                    prefilled = None
            finally:
                seat.leave()
            if tried.no_prefill:
                break
        await self._without_prefill(request, sink, receipt, tried)

    def _alone(
        self, request: TurnRequest, receipt: Receipt, continuation: Continuation, engine: Engine, tried: Attempts
    ) -> bool:
        """Whether the decode engine is to do the whole turn; asked once a turn, for the plan is made once."""
        if tried.planned:
            return False
        tried.planned = True
        plan = self._planner.plan(
            request.facts,
            continuation,
            decode=engine,
            prefill=self._fleet.partners(engine),
            receipt=receipt,
            alone=self._conversations.mode(engine) is not Reuse.STOCK,
        )
        if plan not in (Plan.CONTINUE, Plan.AGGREGATE):
            return False
        receipt.plan = plan.value
        return True

    async def _seat_decode(self, continuation: Continuation, tried: Attempts) -> Seat:
        context = tried.context(continuation.holder)
        try:
            return await self._admission.seat(self._fleet.paired(), context, what="decode")
        except UnavailableError:
            if tried.last is None or tried.last.stale:  # that engine read nothing; it is silent, as it seems
                raise
            raise client_error(tried.last) from tried.last

    async def _prefill_once(
        self, request: TurnRequest, receipt: Receipt, continuation: Continuation, decode: Engine, tried: Attempts
    ) -> Prefilled | None:
        """One prefill hop for a decode engine; None when the engine failed, or none is left to ask."""
        context = tried.context(facts=request.facts)
        try:
            seat = await self._admission.seat(self._fleet.partners(decode), context, what="prefill")
        except UnavailableError:
            tried.no_prefill = True
            return None
        params = self._prefill_params(continuation, seat.engine)
        fresh = params is _FRESH
        receipt.plan = "recompute" if fresh else "pull"
        continuation.reference = None  # used now, whatever comes of it
        continuation.spent |= not fresh
        began = self._clock()
        try:
            prefilled = await self._prefill.run(request, seat.engine, params, resend=fresh)
            seat.first()
        except EngineAnswerError as error:
            if not fresh and error.engine_status in _NOTHING_READ:
                continuation.spent = False
            raise
        except HopFailedError as error:
            self._failed("prefill", request, error, tried)
            if not fresh and not error.consumed:
                continuation.spent = False
            if not fresh and error.reason == "status":
                tried.forgive(error.engine)  # the read may have failed, not the engine: it may compute instead
            return None
        finally:
            seat.leave()
        self._metrics.hop_seconds.observe(self._clock() - began, "prefill")
        self._routing.answered(seat, request.facts, prefilled.usage.prompt_tokens, prefilled.usage.cached_tokens)
        receipt.reason = seat.reason
        receipt.cached_tokens = prefilled.usage.cached_tokens
        self._accounts.tokens(request, prefilled.usage, seat.engine)
        return prefilled

    def _prefill_params(self, continuation: Continuation, prefill: Engine) -> bytes:
        reference = continuation.reference
        engine = None if reference is None else self._fleet.find(reference.engine)
        if reference is None or (engine is not None and not self._fleet.fits(prefill, engine)):
            return _FRESH
        if reference.lease is not None and engine is not None and engine.address.lease_endpoint is not None:
            return orjson.dumps(ClaimOffer(reference.lease, engine.address.lease_endpoint).to_params())
        return reference.params or _FRESH

    async def _decode(
        self,
        request: TurnRequest,
        sink: Sink,
        receipt: Receipt,
        continuation: Continuation,
        seat: Seat,
        prefilled: Prefilled | None,
    ) -> None:
        """The hop that answers; without a prefill hop before it the engine computes the prompt as well."""
        engine = seat.engine
        receipt.engines.append(engine.name)
        mode = self._conversations.mode(engine)
        lease = new_lease_id() if mode is Reuse.LEASED and continuation.key is not None else None
        params = self._handed(prefilled, mode, lease)
        if prefilled is not None:
            self._metrics.handoff_seconds.observe(self._clock() - prefilled.at)
        self._routing.work(seat, request.facts, held=receipt.predicted if prefilled is None else None)
        left: list[Answered] = []
        try:
            answered = await self._answer.run(
                request,
                engine,
                whole_body(request.body) if params == b"{}" else decode_body(request.body, params),
                sink,
                headers=response_headers(request, receipt),
                usage=None if prefilled is None else prefilled.usage,
                on_first=seat.first,
                collect=mode is Reuse.STOCK and request.kind.collects and continuation.key is not None,
                on_left=left.append,
            )
        except asyncio.CancelledError:  # the client left: its conversation may go on from what was generated
            continuation.spent = True
            if lease is not None:
                self._conversations.keep_lease(continuation, engine, lease)
            elif left:
                self._keep(continuation, engine, None, left[0], receipt)
            raise
        except BaseException as error:
            if lease is not None:
                self._conversations.release_lease(engine, lease)
            if not isinstance(error, EngineAnswerError):
                continuation.spent = True  # nobody knows what an engine that failed still holds
            elif prefilled is not None:
                self._unread.free(request, engine, self._handed(prefilled, mode, None))
            raise
        self._keep(continuation, engine, lease, answered, receipt)
        if prefilled is not None:
            seat.learn(None, None)
            self._accounts.compare(request, prefilled.usage, answered.usage)
        else:
            seat.learn(answered.usage.prompt_tokens, answered.usage.cached_tokens)
            receipt.cached_tokens = answered.usage.cached_tokens
            self._accounts.tokens(request, answered.usage, engine)

    def _handed(self, prefilled: Prefilled | None, mode: Reuse, lease: str | None) -> bytes:
        """Transfer parameters for a decode engine: the prompt's blocks, and under which lease to keep its own."""
        params = b"{}" if prefilled is None else prefilled.params
        if mode is not Reuse.LEASED:
            return params
        retention = Retention(lease, self._policy.lease_ttl_s if lease else None).to_params()
        return orjson.dumps(retention) if prefilled is None else merged_params(params, retention)

    def _keep(
        self, continuation: Continuation, engine: Engine, lease: str | None, answered: Answered, receipt: Receipt
    ) -> None:
        """Remember where this turn's KV is."""
        if answered.failed:
            receipt.outcome = "engine_error"
            if lease is not None:
                self._conversations.release_lease(engine, lease)
        elif lease is not None:
            self._conversations.keep_lease(continuation, engine, lease)
        elif answered.params is not None and self._conversations.mode(engine) is Reuse.STOCK:
            try:
                params = checked_params(answered.params, engine, **prefill_params())
            except UnusableParamsError as error:
                _log.warning("no reference kept: %s", error)
                return
            engine.identity = params.identity
            self._conversations.keep_params(continuation, engine, params.raw, answered.answer)

    async def _without_prefill(self, request: TurnRequest, sink: Sink, receipt: Receipt, tried: Attempts) -> None:
        if tried.last is not None and tried.last.engine.role is EngineRole.DECODE:
            raise client_error(tried.last) from tried.last
        if self._policy.on_no_prefill is OnNoPrefill.DECODE_ONLY:
            await self._whole.run(request, sink, receipt, plan="decode_only")
        elif tried.last is not None:
            raise client_error(tried.last) from tried.last
        else:
            raise UnavailableError("no prefill engine is usable now; /ready says which are down", retry_after_s=2)

    def _stale(self, prefilled: Prefilled) -> bool:
        return self._clock() - prefilled.at >= self._policy.prefill_ttl_s

    def _failed(self, hop: str, request: TurnRequest, error: HopFailedError, tried: Attempts) -> None:
        tried.note(error, self._fleet.ranks(error.engine))
        self._accounts.failure(hop, request, error)
