"""The prefill hop: has one engine compute the prompt's KV, and reads where it lies."""

from __future__ import annotations

import msgspec

from kvduplex_router.clock import Clock
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.http.request import post_head, post_request
from kvduplex_router.pd.hop import Hop, open_hop, reply_members
from kvduplex_router.pd.params import UnusableParamsError, checked_params
from kvduplex_router.pd.request import TurnRequest
from kvduplex_router.pd.shape import prefill_body
from kvduplex_router.pd.usage import PromptUsage
from kvduplex_router.requests.fields import KV_PARAMS

__all__ = ["PrefillHop", "Prefilled"]


class Prefilled(msgspec.Struct, frozen=True):
    """What a prefill engine computed.

    Attributes:
        params: Transfer parameters for the decode engine, checked, as JSON.
        usage: Token counts.
        at: Monotonic seconds of its answer; the blocks are not kept for ever.
        engine: Which engine.
    """

    params: bytes
    usage: PromptUsage
    at: float
    engine: Engine


class PrefillHop:
    """Sends turns to prefill engines."""

    def __init__(self, *, clock: Clock, answer_limit: int, keep_forcing: bool) -> None:
        self._clock = clock
        self._answer_limit = answer_limit
        self._keep_forcing = keep_forcing

    async def run(self, request: TurnRequest, engine: Engine, params: bytes, *, resend: bool) -> Prefilled:
        """Have `engine` compute the prompt.

        Args:
            request: The turn.
            engine: Where.
            params: Transfer parameters for it, as JSON: bare, or with a claim or a reference to the last turn's KV.
            resend: Whether sending twice does no harm; it does when `params` can be used only once.

        Raises:
            HopFailedError: The engine failed, or its answer cannot be used.
            EngineAnswerError: The engine refused the request for the client's sake.
        """
        body = prefill_body(request.kind, request.body, params, keep_forcing=self._keep_forcing)
        with request.hop("prefill", engine) as headers:
            message = post_request(post_head(engine.address.origin, request.kind.path), headers, body)
            hop = await open_hop(engine, message, self._clock, resend=resend)
            try:
                raw = await hop.read_all(self._answer_limit)
            finally:
                hop.close()
            return self._read(hop, raw)

    def _read(self, hop: Hop, raw: bytes) -> Prefilled:
        members = reply_members(hop, raw)
        given = members.get(KV_PARAMS)
        try:
            params = checked_params(None if given is None else bytes(given), hop.engine)
        except UnusableParamsError as error:
            raise hop.unusable(str(error)) from error
        hop.engine.identity = params.identity
        return Prefilled(params.raw, PromptUsage.of_member(members.get("usage")), self._clock(), hop.engine)
