"""Prefill blocks that no decode engine will read.

A prefill engine keeps a prompt's blocks until a decode engine has said that it has them. vLLM's serving code also says
so for a request that it refuses (since 0.21, ``_with_kv_transfer_rejection_cleanup``), but what its request model
refuses never reaches that code: the blocks would stay until the prefill engine's own timeout, and a few such requests
with long prompts fill its memory. So the decode engine that refused is sent a few bytes more: a request that is well
formed, names the same blocks, and is one that the serving code refuses. Nobody waits for that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvduplex_router.clock import Clock
from kvduplex_router.errors import EngineAnswerError
from kvduplex_router.fleet.engine import Engine
from kvduplex_router.http.request import post_head, post_request
from kvduplex_router.pd.hop import HopFailedError, open_hop
from kvduplex_router.pd.request import TurnRequest
from kvduplex_router.requests.apis import COMPLETIONS
from kvduplex_router.requests.fields import KV_PARAMS
from kvduplex_router.telemetry.metrics import Metrics

__all__ = ["UnreadBlocks"]

_log = logging.getLogger("kvduplex.router.turn")
_AT_ONCE: Final = 64
_DEADLINE_S: Final = 5.0
_SERVING_REFUSES: Final = 400
_REFUSED: Final = b'"prompt":[0],"max_tokens":1,"min_tokens":2,"stream":false'
"""More tokens at least than at most: well formed, and refused by every vLLM before it does anything."""


class UnreadBlocks:
    """Has blocks freed that a refused request left behind; see the module.

    Args:
        metrics: Where that is counted.
        clock: Monotonic seconds.
    """

    def __init__(self, *, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def free(self, request: TurnRequest, engine: Engine, params: bytes) -> None:
        """Have a prompt's blocks freed, without a wait.

        No answer tells which code of the decode engine refused. So the prefill engine may be told twice: it then writes
        an error line about a request that it does not know, and does nothing (``nixl/pull_worker.py``,
        ``_get_new_notifs``).

        Args:
            request: The turn that was refused.
            engine: The decode engine that refused it.
            params: What that engine was given to read the blocks, as JSON.
        """
        if self._closed:
            return
        if len(self._tasks) >= _AT_ONCE:
            self._metrics.blocks_freed.inc("dropped")
            return
        task = asyncio.create_task(self._tell(request, engine, params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Until cancelled; then nobody is told any more, and blocks that are not freed yet lapse by themselves."""
        try:
            await asyncio.Event().wait()
        finally:
            self._closed = True
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self, request: TurnRequest, engine: Engine, params: bytes) -> None:
        model = b'"model":%b,' % request.body.raw("model") if "model" in request.body else b""
        body = b'{%b%b,"%b":%b}' % (model, _REFUSED, KV_PARAMS.encode(), params)
        message = post_request(post_head(engine.address.origin, COMPLETIONS.path), request.headers, body)
        why = ""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                hop = await open_hop(engine, message, self._clock, resend=True)
            hop.close()  # it took the request, which ends like any that is left: the blocks are freed as well
        except EngineAnswerError as refusal:
            if refusal.engine_status != _SERVING_REFUSES:
                why = f"decode engine {engine.name} answered {refusal.engine_status}"
        except HopFailedError as error:
            why = str(error)
        except TimeoutError:
            why = f"decode engine {engine.name} did not answer within {_DEADLINE_S:g} s"
        self._metrics.blocks_freed.inc("failed" if why else "told")
        if why:
            _log.warning(
                "turn %s: a prefill engine keeps the blocks of a refused request until they lapse: %s",
                request.request_id,
                why,
            )
