"""One client's request while it is served: ends the work for it the moment the client leaves or stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kvduplex_router.api.protocol import CONNECTION, ClientProtocol
from kvduplex_router.api.receive import ClientGoneError, discard_body, read_body, until_gone
from kvduplex_router.api.reply import Receive, Reply, Scope, Send, rendered_error
from kvduplex_router.errors import RequestTimeoutError, RouterError, StoppingError
from kvduplex_router.http.watchdog import NEVER, Watchdog
from kvduplex_router.requests.kinds import ErrorStyle

__all__ = ["Client"]

_END_S: Final = 1.0
"""Seconds an engine has to end a stream whose last frame the client has, and did not wait."""


class Client:
    """An ASGI client, served by the task that made this object; `close` it when done.

    Args:
        scope: The request.
        receive: Its body.
        send: Its answer.
        write_s: Seconds the client may take to make room for more of the answer.
        watchdog: Watches that.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_last_frame",
        "_task",
        "_watchdog",
        "_watcher",
        "headers",
        "receive",
        "reply",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, write_s: float, watchdog: Watchdog) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self._connection: ClientProtocol | None = scope.get(CONNECTION)
        self.reply = Reply(send, write_s=write_s, on_stalled=self._stalled, connection=self._connection)
        self._watchdog = watchdog
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._last_frame: tuple[bytes, ...] = ()
        watchdog.add(self.reply)

    async def body(self, *, limit: int, timeout_s: float) -> bytes:
        """The request body.

        Raises:
            BodyTooLargeError: It is, or claims to be, larger than `limit` bytes.
            RequestTimeoutError: It did not arrive within `timeout_s`.
            ClientGoneError: The client left.
            StoppingError: The router waits no longer.
        """
        self.reply.expect(timeout_s)
        try:
            with self._interruptible():
                return await read_body(self.receive, self.headers, limit=limit)
        finally:
            self.reply.deadline = NEVER

    @property
    def has_all(self) -> bool:
        """Whether the client was sent its stream's last frame; it may leave then, and openai-python does."""
        latest = b"\n" + self.reply.latest
        return any(mark in latest for mark in self._last_frame)

    async def while_connected(self, work: Coroutine[Any, Any, None], *, last_frame: tuple[bytes, ...]) -> None:
        """Run `work`, cancelling it when the client goes.

        When it goes with its stream's last frame, the work has a moment to end as if it had stayed.

        Args:
            work: Answers the request.
            last_frame: Byte strings one of which the last frame of a stream has, a line feed before it included.

        Raises:
            ClientGoneError: The client went.
            StoppingError: The router waits no longer.
        """
        self._last_frame = last_frame
        if self._connection is not None:
            self._connection.on_gone = self._left
        else:
            self._watcher = asyncio.get_running_loop().create_task(until_gone(self.receive))
            self._watcher.add_done_callback(self._disconnected)
        with self._interruptible():
            await work

    async def refuse_unread(self, error: RouterError, style: ErrorStyle, headers: Mapping[str, str]) -> None:
        """Refuse a request whose body was not read to its end, in a way that lets the client read why."""
        status, body, more = rendered_error(error, style)
        length = {"content-length": str(len(body)), "connection": "close"}
        await self.reply.start(status, "application/json", {**headers, **more, **length})
        await self.reply.send(body)
        await discard_body(self.receive)
        await self.reply.end()

    def close(self) -> None:
        """Stop watching."""
        self._task = None
        self._watchdog.discard(self.reply)
        if self._connection is not None:
            self._connection.on_gone = None
        if self._watcher is not None:
            self._watcher.cancel()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Within, what ends the request is raised as what it is."""
        connection = self._connection
        if connection is not None:
            connection.on_cut = self._stopped
        try:
            yield
        except asyncio.CancelledError:
            self._translate()
            raise
        finally:
            if connection is not None:
                connection.on_cut = None

    def _translate(self) -> None:
        """Raise what this object cancelled the task for; return when someone else cancelled it."""
        if self._error is not None and self._task is not None:
            self._task.uncancel()
            raise self._error from None

    def _disconnected(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled():
            self._left()

    def _left(self) -> None:
        if self.reply.ended:
            return
        gone = ClientGoneError("the client closed its connection")
        if self.has_all:
            asyncio.get_running_loop().call_later(_END_S, self._cancel, gone)
        else:
            self._cancel(gone)

    def _stopped(self) -> bool:
        if self._task is None or self._error is not None or self.reply.ended:
            return False
        message = "the router is stopping and the answer is not complete; send the request again"
        self._cancel(StoppingError(message, retry_after_s=2))
        return not self.has_all

    def _stalled(self) -> None:
        started = self.reply.started
        self._cancel(ClientGoneError("the client stopped reading") if started else _upload_timeout())

    def _cancel(self, error: Exception) -> None:
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()


def _upload_timeout() -> RequestTimeoutError:
    return RequestTimeoutError("the request body did not arrive in time")
