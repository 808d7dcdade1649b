"""A request as the turn engine takes it, and the sink its answer goes to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvduplex_router.fleet.engine import Engine
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind
from kvduplex_router.routing.facts import Facts
from kvduplex_router.telemetry.tracing import TurnTrace

__all__ = ["Receipt", "Sink", "TurnRequest"]


class TurnRequest(msgspec.Struct, frozen=True):
    """One request of a client.

    Attributes:
        kind: API.
        body: Its body.
        tenant: Whose it is.
        request_id: The router's id of the turn, sent to both hops.
        conversation_id: The client's, when it named one.
        headers: Header lines for engines.
        workload: The workload class that the client names.
        facts: What routing worked out about it.
        trace: Its span, when turns are traced.
    """

    kind: ApiKind
    body: Body
    tenant: str
    request_id: str
    conversation_id: str | None
    headers: bytes
    workload: str | None = None
    facts: Facts | None = None
    trace: TurnTrace | None = None

    def hop(self, name: str, engine: Engine) -> AbstractContextManager[bytes]:
        """Header lines for one request to an engine, and that request's span while it is entered."""
        if self.trace is None:
            return nullcontext(self.headers)
        return self.trace.hop(name, engine.name, self.headers)

    @property
    def stream(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Receipt:
    """How a turn went, for headers, metrics and the log. No text of the client's is in it.

    Attributes:
        plan: ``continue``, ``pull``, ``recompute``, ``aggregate``, ``decode_only`` or ``replica``.
        outcome: ``ok`` or why not.
        cached_tokens: As the hop that computed the prompt reported; None when it did not.
        detail: Why the request was not split.
        engines: Names of the engines asked, in order.
        streamed: The client asked for a stream.
        workload: Its class.
        reason: What decided the pick of the engine that computed the prompt.
        tokens: Prompt tokens as the router counted them; 0 when it did not.
        predicted: Of those, tokens that were expected not to be computed.
        expected_s: Seconds to the first token as priced.
        delivered_s: As it came.
        runner_up: The plan that came second.
        runner_up_s: Its price.
        trace: The turn's span, when it is traced.
    """

    plan: str = "none"
    outcome: str = "ok"
    cached_tokens: int | None = None
    detail: str = ""
    engines: list[str] = field(default_factory=list)
    streamed: bool = False
    workload: str = ""
    reason: str = ""
    tokens: int = 0
    predicted: int = 0
    expected_s: float | None = None
    delivered_s: float | None = None
    runner_up: str | None = None
    runner_up_s: float | None = None
    trace: TurnTrace | None = None


class Sink(Protocol):
    """Where an answer goes."""

    @property
    def started(self) -> bool:
        """Whether the client has been sent a status."""

    async def start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        """Send status and headers of an answer whose length is not known."""

    async def send(self, data: bytes) -> None:
        """Send a part of the body."""

    @property
    def takes_now(self) -> bool:
        """Whether the body has begun and a part of it can be sent without a wait."""

    def send_now(self, data: bytes) -> None:
        """Send a part of the body while `takes_now`."""

    async def end(self, data: bytes = b"") -> None:
        """Send the last part."""

    async def whole(self, status: int, content_type: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer in one piece."""
