"""One client's request while it is served: ends the work for it the moment the client leaves or stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from kvduplex_router.api.receive import ClientGoneError, discard_body, until_gone
from kvduplex_router.api.reply import Receive, Reply, Send, rendered_error
from kvduplex_router.errors import RouterError
from kvduplex_router.http.watchdog import Watchdog

__all__ = ["Client"]


class Client:
    """An ASGI client; used by the one task that serves it."""

    __slots__ = ("_gone", "_task", "_watchdog", "receive", "reply")

    def __init__(self, receive: Receive, send: Send, *, write_s: float, watchdog: Watchdog) -> None:
        self.receive = receive
        self.reply = Reply(send, write_s=write_s, on_stalled=self._leave)
        self._watchdog = watchdog
        self._task: asyncio.Task[Any] | None = None
        self._gone = False

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, cancelling it when the client goes.

        Raises:
            ClientGoneError: The client went.
        """
        self._task = asyncio.current_task()
        watcher = asyncio.get_running_loop().create_task(until_gone(self.receive))
        watcher.add_done_callback(self._disconnected)
        self._watchdog.add(self.reply)
        try:
            await work
        except asyncio.CancelledError:
            if self._gone and self._task is not None and self._task.uncancel() == 0:
                raise ClientGoneError from None
            raise
        finally:
            self._task = None
            self._watchdog.discard(self.reply)
            watcher.cancel()

    async def refuse_unread(self, error: RouterError, headers: Mapping[str, str]) -> None:
        """Refuse a request whose body was not read to its end, in a way that lets the client read why."""
        status, body, more = rendered_error(error)
        length = {"content-length": str(len(body)), "connection": "close"}
        await self.reply.start(status, "application/json", {**headers, **more, **length})
        await self.reply.send(body)
        await discard_body(self.receive)
        await self.reply.end()

    def _disconnected(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and not self.reply.ended:
            self._leave()

    def _leave(self) -> None:
        if self._task is not None and not self._gone:
            self._gone = True
            self._task.cancel()
