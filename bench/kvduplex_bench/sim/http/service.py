"""One simulated engine: its routes over its core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from random import Random
from typing import Final

import msgspec
import zmq.asyncio

from kvduplex_bench.sim.core.chain import block_hashes, root_of
from kvduplex_bench.sim.core.engine import EngineCore
from kvduplex_bench.sim.core.sequence import Work
from kvduplex_bench.sim.errors import SimError
from kvduplex_bench.sim.events import EventPublisher
from kvduplex_bench.sim.http.answers import StreamedAnswer, WholeAnswer
from kvduplex_bench.sim.http.connection import Connection, HttpRequest, Responder
from kvduplex_bench.sim.http.driver import Driver
from kvduplex_bench.sim.http.faults import Faults
from kvduplex_bench.sim.http.metrics import CONTENT_TYPE, render_metrics
from kvduplex_bench.sim.http.request import Kind, RefusedError, TurnRequest, read_request
from kvduplex_bench.sim.http.shapes import Shape, compact, error_body, models_body
from kvduplex_bench.sim.http.tokens import Tokens
from kvduplex_bench.sim.http.transfer import Transfers
from kvduplex_bench.sim.settings import EngineSettings
from kvduplex_transfer.leases.params import Retention
from kvduplex_transfer.leases.records import LeaseLimits

__all__ = ["SimEngine"]

_log = logging.getLogger(__name__)
_KINDS: Final = {"/v1/chat/completions": Kind.CHAT, "/v1/completions": Kind.COMPLETIONS}
_VERSION: Final = "0.32.0"
_FLUSH_S: Final = 0.005


class SimEngine:
    """One engine.

    Args:
        settings: What it is.
        tokens: The tokenizer, shared by the engines of a process.
        context: ZeroMQ, shared by the engines of a process.
        on_kill: Called when it is told to die.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        tokens: Tokens,
        context: zmq.asyncio.Context,
        on_kill: Callable[[SimEngine], None] = lambda _engine: None,
    ) -> None:
        self.settings = settings
        self.faults = Faults()
        self._tokens = tokens
        self._context = context
        self._on_kill = on_kill
        self._chance = Random(settings.seed)
        self._root = root_of(settings.timing.model)
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._events: EventPublisher | None = None
        self._subscribers_wait = False

    async def start(self) -> None:
        """Serve from now on.

        Raises:
            SimError: A port is taken.
        """
        settings, address, loop = self.settings, self.settings.address, asyncio.get_running_loop()
        timing, scale = settings.timing, settings.time_scale
        limits = LeaseLimits(
            budget_blocks=int(timing.kv_blocks * settings.budget),
            lease_ttl_s=min(30.0, settings.blocks_ttl_s),
            max_ttl_s=settings.blocks_ttl_s,
        )
        self.core = EngineCore(timing, clock=loop.time, caching=settings.caching, leases=limits, recording=True)
        self.driver = Driver(
            self.core, time_scale=scale, stream_interval=settings.stream_interval, after_step=self._publish
        )
        self.transfers = Transfers(settings, self.core, str(uuid.uuid4()))
        try:
            self._server = await loop.create_server(
                lambda: Connection(self._handle, self._connections), address.host, address.port, backlog=1024
            )
        except OSError as error:
            raise SimError(f"{address.url} cannot be served: {error.strerror}; choose another --port") from error
        try:
            await self.transfers.start()
            self._events = EventPublisher(
                self._context,
                endpoint=f"tcp://{address.host}:{address.events}",
                replay=f"tcp://{address.host}:{address.replay}",
                block_size=timing.block_size,
            )
        except SimError:
            await self.kill()
            raise
        self._task = loop.create_task(self.driver.run())

    async def stop(self, grace_s: float) -> None:
        """Take no new requests, finish what is being answered within `grace_s`, and end."""
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        while self._connections and (left_s := deadline - loop.time()) > 0:
            for connection in list(self._connections):
                connection.finish()
            answering = [task for connection in self._connections if (task := connection.answering) is not None]
            # Without one, the ends of answers are on their way out.
            await (asyncio.wait(answering, timeout=left_s) if answering else asyncio.sleep(min(_FLUSH_S, left_s)))
        await self.kill()

    async def kill(self) -> None:
        """End at once, as a killed process would."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.transfers.close()
        if self._events is not None:
            await self._events.close()
        self._server = self._task = self._events = None

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        timing = self.settings.timing
        match (request.method, request.path):
            case ("POST", path) if path in _KINDS:
                await self._complete(request.body, _KINDS[path], responder)
            case ("POST", path) if path.removesuffix("/render") in _KINDS:
                self._render(request.body, _KINDS[path.removesuffix("/render")], responder)
            case ("GET", "/health" | "/ping"):
                responder.whole(503 if self.faults.unhealthy else 200, b"")
            case ("GET", "/metrics"):
                text = render_metrics(self.core, self.driver, self.transfers.refused)
                responder.whole(200, text, CONTENT_TYPE)
            case ("GET", "/v1/models"):
                responder.whole(200, models_body(timing.model, timing.max_model_len))
            case ("GET", "/version"):
                responder.whole(200, compact({"version": _VERSION}))
            case ("GET", "/sim/faults" | "/sim/offers" as path):
                responder.whole(200, compact(self.faults if path == "/sim/faults" else self.transfers.offers))
            case ("POST", "/sim/faults"):
                self._set_faults(request.body, responder)
            case ("POST", "/reset_prefix_cache"):
                self._reset(responder)
            case _:
                responder.whole(404, error_body("Not Found", kind="NotFoundError", status=404))

    async def _complete(self, raw: bytes, kind: Kind, responder: Responder) -> None:
        if self.faults.hang:
            await asyncio.Event().wait()
        if self.faults.errs(self._chance):
            responder.whole(500, error_body("simulated failure", kind="InternalServerError", status=500))
            return
        if (request := self._read(raw, kind, responder)) is not None:
            await self._generate(request, responder)

    def _render(self, raw: bytes, kind: Kind, responder: Responder) -> None:
        """Token ids of a prompt, without generating."""
        if (request := self._read(raw, kind, responder)) is not None:
            rendered = {
                "request_id": uuid.uuid4().hex, "model": request.model, "token_ids": request.prompt,
                "sampling_params": {"max_tokens": request.output_tokens}, "stream": request.stream,
            }  # fmt: skip
            responder.whole(200, compact(rendered if kind is Kind.CHAT else [rendered]))

    def _read(self, raw: bytes, kind: Kind, responder: Responder) -> TurnRequest | None:
        timing = self.settings.timing
        try:
            return read_request(raw, kind, self._tokens, model=timing.model, max_model_len=timing.max_model_len)
        except RefusedError as error:
            body = error_body(str(error), kind=error.kind, status=error.status, param=error.param)
            responder.whole(error.status, body)
            return None

    async def _generate(self, request: TurnRequest, responder: Responder) -> None:
        work, texts, shape = *self._work(request), Shape(request)
        params = request.params or {}
        retention, send_s = await self.transfers.prepare(work, params) if params else (None, None)
        listener: WholeAnswer
        if request.stream:
            listener = StreamedAnswer(
                shape=shape, texts=texts, finish=request.finish_reason, responder=responder, work=work,
                breaks=self.faults.breaks(self._chance),
            )  # fmt: skip
        else:
            listener = WholeAnswer()
        self._submit(work, listener, retention, send_s)
        try:
            await listener.done
        finally:
            self.driver.forget(work)
            self.core.abort(work)
        if not request.stream:
            given = self.transfers.answer(work, params, retention) if params else None
            responder.whole(200, shape.whole("".join(texts), work.cached_tokens, given))

    def _work(self, request: TurnRequest) -> tuple[Work, list[str]]:
        size = self.settings.timing.block_size
        root = self._root if not request.salt else root_of(self.settings.timing.model, request.salt)
        hashes = block_hashes(request.prompt, size, root)
        seed = root_of("answer", str(request.prompt[-32:]), str(len(request.prompt)))
        answer, texts = self._tokens.answer(seed, request.output_tokens)
        tokens = [*request.prompt, *answer]
        work = Work(
            id=f"req-{uuid.uuid4().hex}",
            prompt_tokens=len(request.prompt),
            output_tokens=request.output_tokens,
            hashes=block_hashes(tokens, size, root, hashes),
            tokens=tokens,
        )
        return work, texts

    def _submit(self, work: Work, listener: WholeAnswer, retention: Retention | None, send_s: float | None) -> None:
        if self.core.scheduler.blocks_needed(work) > self.core.pool.total:
            raise SimError(f"a request of {work.prompt_tokens} tokens needs more blocks than the engine has")
        work.arrived = self.driver.now()
        self.driver.listen(work, listener)
        self.core.submit(work, retention=retention, send_s=send_s)
        self.driver.wake()

    def _publish(self) -> None:
        if self.core.events and self._events is not None:
            events, self.core.events = self.core.events, []
            self._events.publish(events)

    def _reset(self, responder: Responder) -> None:
        self.core.table.drop_held()
        self.core.collect()
        self.core.pool.clear()
        if self._events is not None:
            self._events.cleared()
        responder.whole(200, b"")

    def _set_faults(self, raw: bytes, responder: Responder) -> None:
        try:
            faults = msgspec.json.decode(raw, type=Faults)
        except (msgspec.MsgspecError, ValueError) as error:
            responder.whole(400, error_body(str(error), kind="BadRequestError", status=400))
            return
        self.faults = faults
        self.core.scheduler.slow = faults.slow
        responder.whole(200, msgspec.json.encode(faults))
        if faults.kill:
            _log.info("engine %s was told to die", self.settings.address.url)
            self._on_kill(self)
