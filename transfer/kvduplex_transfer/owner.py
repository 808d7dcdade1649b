"""The one thread that touches NIXL, and the way other threads have it do something by a deadline."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvduplex_transfer.errors import AgentClosedError, TransferTimeoutError

__all__ = ["OwnerThread"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class _Call(Generic[_Result]):
    """One thing to be done, seen from both threads."""

    __slots__ = ("_abandoned", "_discard", "_done", "_error", "_function", "_gate", "_result", "_started")

    def __init__(self, function: Callable[[], _Result], discard: Callable[[_Result], None] | None) -> None:
        self._function = function
        self._discard = discard
        self._gate = threading.Lock()  # orders "the caller gave up" against "the owner began" and "it is done"
        self._done = threading.Lock()
        self._done.acquire()
        self._started = False
        self._abandoned = False
        self._result: _Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, on the owner thread, unless the caller has given up."""
        if not self._begin():
            return
        try:
            result = self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whose error it is
            self._error = error
            self._end()
            return
        if self._end() and self._discard is not None:
            self._discard(result)

    def _begin(self) -> bool:
        with self._gate:
            self._started = not self._abandoned
            return self._started

    def _end(self) -> bool:
        """Tell the caller; answers whether it has given up."""
        with self._gate:
            self._done.release()
            return self._abandoned

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False when the deadline passed, after which the result is discarded."""
        try:
            if self._done.acquire(timeout=timeout_s):
                return True
        except BaseException:
            self._abandon()
            raise
        return self._abandon()

    def _abandon(self) -> bool:
        """Give up, unless it was done in the meantime."""
        with self._gate:
            if self._done.acquire(blocking=False):
                return True
            self._abandoned = True
            return False

    @property
    def started(self) -> bool:
        return self._started

    def outcome(self) -> _Result:
        """Result, or the error raised."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class OwnerThread:
    """Runs calls one after the other on a thread of its own, and a tick in between.

    Args:
        name: Thread name.
        tick: Called on the thread between calls; answers the seconds until it wants to be called again, or None
            when it can wait for the next call.
        timeout_s: Deadline of every call, in seconds, counted from its submission.
    """

    def __init__(self, name: str, *, tick: Callable[[], float | None], timeout_s: float) -> None:
        self._tick = tick
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._submit = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def call(
        self,
        function: Callable[[], _Result],
        *,
        what: str,
        discard: Callable[[_Result], None] | None = None,
        timeout_s: float | None = None,
    ) -> _Result:
        """Have `function` run on the thread and return its result or raise its error.

        Args:
            function: What to do.
            what: Its name, for the message of a missed deadline.
            discard: Takes the result, on the thread, when it came after the deadline.
            timeout_s: Deadline of this call, where it differs.

        Raises:
            TransferTimeoutError: It was not done in time. Not begun, it never will be; begun, its result is discarded.
            AgentClosedError: `stop` was called, or the thread did not come along when the process forked.
        """
        call = _Call(function, discard)
        with self._submit:
            if self._closed:
                raise AgentClosedError(f"{self._thread.name} is closed; open a new agent")
            if not self._thread.is_alive():
                raise AgentClosedError(f"{self._thread.name} did not survive a fork; open agents after forking")
            self._calls.put(call)
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        if not call.wait(deadline_s):
            state = "is still running in native code" if call.started else "waited behind another call"
            raise TransferTimeoutError(f"{self._thread.name}: {what} {state} after {deadline_s:g} s")
        return call.outcome()

    def stop(self, last: Callable[[], None]) -> None:
        """Run `last` after the calls already submitted, refuse later ones, and end the thread. Idempotent.

        Raises:
            TransferTimeoutError: The thread is stuck in native code; it ends when that returns.
        """
        call = _Call(last, None)
        with self._submit:
            first, self._closed = not self._closed, True
            if first:
                self._calls.put(call)
                self._calls.put(None)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise TransferTimeoutError(f"{self._thread.name} did not end within {self._timeout_s:g} s: stuck in NIXL")
        if first:
            call.outcome()

    def _work(self) -> None:
        while True:
            timeout_s = self._tick_safely()
            try:
                call = self._calls.get(timeout=timeout_s)
            except queue.Empty:
                continue
            if call is None:
                break
            call.run()
            del call  # or its result would live until the next call

    def _tick_safely(self) -> float | None:
        try:
            return self._tick()
        except Exception:  # noqa: BLE001 - a fault here must not end the thread, or every caller would time out
            _log.exception("%s: polling reads failed", self._thread.name)
            return 1.0
