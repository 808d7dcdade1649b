"""A request that one engine serves alone."""

from __future__ import annotations

import asyncio

from kvduplex_router.errors import UnavailableError
from kvduplex_router.fleet.fleet import Fleet
from kvduplex_router.pd.attempts import Accounts, Attempts
from kvduplex_router.pd.client_view import client_error, response_headers
from kvduplex_router.pd.decode import AnswerHop
from kvduplex_router.pd.hop import HopFailedError
from kvduplex_router.pd.request import Receipt, Sink, TurnRequest
from kvduplex_router.pd.shape import whole_body
from kvduplex_router.routing.admission import Admission, Seat
from kvduplex_router.routing.service import RoutingService

__all__ = ["WholeTurn"]


class WholeTurn:
    """Sends requests whole to decode engines, or to plain replicas where there are no roles."""

    def __init__(
        self, *, fleet: Fleet, admission: Admission, answer: AnswerHop, accounts: Accounts, routing: RoutingService
    ) -> None:
        self._routing = routing
        self._fleet = fleet
        self._admission = admission
        self._answer = answer
        self._accounts = accounts

    async def run(self, request: TurnRequest, sink: Sink, receipt: Receipt, *, plan: str) -> None:
        """Answer a request, by another engine when one cannot be reached.

        Raises:
            RouterError: No answer; nothing was sent to the client.
            BrokenStreamError: The answer broke off; the client was told so.
        """
        receipt.plan = plan
        receipt.cached_tokens = None
        tried = Attempts()
        while True:
            seat = await self._seat(request, tried)
            try:
                return await self._ask(request, sink, receipt, seat)
            except HopFailedError as error:
                tried.note(error, self._fleet.ranks(error.engine))
                self._accounts.failure("whole", request, error)
                if error.consumed:
                    raise client_error(error) from error
            finally:
                seat.leave()

    async def _seat(self, request: TurnRequest, tried: Attempts) -> Seat:
        what = "decode" if self._fleet.disaggregated else "serving"
        try:
            return await self._admission.seat(self._fleet.whole, tried.context(facts=request.facts), what=what)
        except UnavailableError:
            if tried.last is None:
                raise
            raise client_error(tried.last) from tried.last

    async def _ask(self, request: TurnRequest, sink: Sink, receipt: Receipt, seat: Seat) -> None:
        engine = seat.engine
        if seat.reservation is not None and not request.stream:  # nothing shows when its prompt is computed
            asyncio.get_running_loop().call_later(seat.reservation.expected_s, seat.reservation.computed_by_now)
        receipt.engines.append(engine.name)
        receipt.reason = seat.reason
        receipt.predicted = 0 if request.facts is None else request.facts.overlaps.get(engine.name, 0)
        receipt.expected_s = None if seat.reservation is None else seat.reservation.expected_s
        headers = response_headers(request, receipt)
        body = whole_body(request.body)
        answered = await self._answer.run(
            request, engine, body, sink, headers=headers, usage=None, collect=False, on_first=seat.first
        )
        if answered.failed:
            receipt.outcome = "engine_error"
        receipt.cached_tokens = answered.usage.cached_tokens
        self._accounts.tokens(request, answered.usage, engine)
        usage = answered.usage
        self._routing.answered(
            seat, request.facts, usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens
        )  # fmt: skip
