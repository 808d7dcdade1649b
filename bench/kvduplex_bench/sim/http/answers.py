"""Answers on their way to clients: whole, or in parts as the tokens come."""

from __future__ import annotations

import asyncio

from kvduplex_bench.sim.core.sequence import Work
from kvduplex_bench.sim.http.connection import Responder
from kvduplex_bench.sim.http.shapes import Shape

__all__ = ["StreamedAnswer", "WholeAnswer"]


class WholeAnswer:
    """Waits for the end."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def progress(self, generated: int, finished: bool) -> None:
        """Only the end counts."""
        del generated
        if finished and not self.done.done():
            self.done.set_result(None)


class StreamedAnswer(WholeAnswer):
    """Sends tokens as they come.

    Args:
        shape: Its JSON.
        texts: The answer's tokens as text.
        finish: Why it ends.
        responder: The client.
        work: The request, for its counts.
        breaks: Break off after the first token.
    """

    def __init__(
        self, *, shape: Shape, texts: list[str], finish: str, responder: Responder, work: Work, breaks: bool
    ) -> None:
        super().__init__()
        self._shape = shape
        self._texts = texts
        self._finish = finish
        self._responder = responder
        self._work = work
        self._breaks = breaks
        self._sent = 0

    def progress(self, generated: int, finished: bool) -> None:
        """Send what is new."""
        if self.done.done() or (generated <= self._sent and not finished):
            return
        text = "".join(self._texts[self._sent : generated])
        frame = self._shape.delta(text, self._finish if finished else None)
        if not self._sent:
            self._responder.stream(self._shape.opening() + frame)
        else:
            self._responder.part(frame)
        self._sent = generated
        if self._breaks:
            self._responder.break_off()
            self.done.set_result(None)
        elif finished:
            self._responder.end(self._shape.closing(self._work.cached_tokens))
            self.done.set_result(None)
