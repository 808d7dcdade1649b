"""One client connection to an engine: an asyncio protocol over httptools that carries one exchange at a time.

The body is handed over as it arrives, joined per read of the socket, and reading is paused while the consumer lags,
so a slow client bounds the memory of its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

import httptools

from kvduplex_router.http.errors import BrokenAnswerError, ExchangeError, StalledError
from kvduplex_router.http.response import Response
from kvduplex_router.http.watchdog import NEVER

__all__ = ["Connection"]

_MAX_HEAD_BYTES: Final = 64 * 1024
_INFORMATIONAL: Final = range(100, 200)


class Connection(asyncio.Protocol):
    """A connection and the response it is reading.

    Args:
        on_idle: Called when a response ended cleanly and the connection may carry another exchange.
        on_closed: Called once when the connection is gone.
    """

    def __init__(self, *, on_idle: Callable[[Connection], None], on_closed: Callable[[Connection], None]) -> None:
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._head_bytes = self._header_bytes = 0
        self._first_byte_s = 0.0
        self._idle_s = 0.0
        self.deadline = NEVER
        self.received = False
        self.closed = False

    # -- exchange ------------------------------------------------------------------------------------------------

    def begin(self, request: bytes, *, first_byte_s: float, idle_s: float) -> Response:
        """Send a complete request and return the response to wait on.

        Args:
            request: Request line, headers and body.
            first_byte_s: Seconds of silence allowed before the response head.
            idle_s: Seconds of silence allowed between parts of the body.
        """
        assert self._transport is not None and self._response is None  # noqa: S101, PT018 - the pool's own invariant
        response = self._response = Response(self)
        self._head_bytes = self._header_bytes = 0
        self.received = False
        self._first_byte_s = first_byte_s
        self._idle_s = idle_s
        self.deadline = self._loop.time() + first_byte_s
        self._transport.write(request)
        return response

    def abort(self) -> None:
        """Drop the connection at once, so that the engine notices and stops its work."""
        if self._transport is not None and not self.closed:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading; silence is the consumer's own doing until `resume`."""
        self._reading(False)
        self.deadline = NEVER

    def resume(self) -> None:
        """Read on."""
        self._reading(True)
        self.deadline = self._loop.time() + self._idle_s

    def on_deadline(self) -> None:
        """A silence limit passed: fail the exchange, or retire an idle connection."""
        phase = f"headers within {self._first_byte_s:g} s" if self._waits_for_head() else f"data for {self._idle_s:g} s"
        self._fail(StalledError(f"the engine sent no {phase}"))

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Feed the parser and wake the consumer once."""
        response = self._response
        if response is None:  # nothing was asked for: the stream is out of step
            self.abort()
            return
        self.received = True
        self.deadline = self._loop.time() + self._idle_s
        if not response.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BrokenAnswerError(f"the engine's answer is not valid HTTP ({type(error).__name__})"))
            return
        if max(self._header_bytes, 0 if response.has_head else self._head_bytes) > _MAX_HEAD_BYTES:
            self._fail(BrokenAnswerError(f"the engine's response head is larger than {_MAX_HEAD_BYTES} bytes"))
            return
        response.wake()

    def eof_received(self) -> bool:
        """The engine closed its side; an answer without a length ends here."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response as complete, truncated or reset."""
        self.closed = True
        self.deadline = NEVER
        response, self._response = self._response, None
        self._on_closed(self)
        if response is None:
            return
        if response.ends_with_connection and exc is None:
            response.finish(None)
        else:
            what = "reset" if exc is not None else "closed"
            where = "mid-answer" if response.has_head else "before it answered"
            response.finish(BrokenAnswerError(f"the engine's connection was {what} {where}"))

    # -- httptools callbacks -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A message nobody asked for means the stream is out of step."""
        if self._response is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a response header; of repeated ones the last counts."""
        if self._response is not None:
            self._header_bytes += len(name) + len(value)
            self._response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is complete; informational heads are skipped."""
        response = self._response
        if response is None:
            return
        status = self._parser.get_status_code()
        if status in _INFORMATIONAL:
            response.headers.clear()
            return
        response.start(status)

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        if self._response is not None:
            self._response.feed(body)

    def on_message_complete(self) -> None:
        """The response ended; keep the connection when the engine agrees."""
        response = self._response
        if response is None or not response.has_head:
            return
        self._response = None
        self.deadline = NEVER
        if response.paused:
            response.paused = False
            self._reading(True)
        response.finish(None)
        if self._parser.should_keep_alive():
            self._on_idle(self)
        else:
            self.abort()

    # -- own -----------------------------------------------------------------------------------------------------

    def _reading(self, wanted: bool) -> None:
        if self._transport is None or self.closed or self._transport.is_closing():
            return
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _waits_for_head(self) -> bool:
        return self._response is not None and not self._response.has_head

    def _fail(self, error: ExchangeError) -> None:
        response, self._response = self._response, None
        self.deadline = NEVER
        self.abort()
        if response is not None:
            response.finish(error)
