"""Calls to the owner thread end by their deadline, whatever the thread does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvduplex_transfer.errors import AgentClosedError, TransferTimeoutError
from kvduplex_transfer.owner import OwnerThread

WAIT_S = 20.0


class Blocker:
    """Keeps the owner thread busy, as native code that does not return."""

    def __init__(self, owner: OwnerThread) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._occupy, args=(owner,))
        self.thread.start()
        assert self.begun.wait(WAIT_S)

    def _occupy(self, owner: OwnerThread) -> None:
        owner.call(self._block, what="blocking", timeout_s=WAIT_S)

    def _block(self) -> None:
        self.begun.set()
        assert self.free.wait(WAIT_S)

    def end(self) -> None:
        self.free.set()
        self.thread.join(WAIT_S)


@pytest.fixture
def owner() -> Iterator[OwnerThread]:
    thread = OwnerThread("owner", tick=lambda: None, timeout_s=WAIT_S)
    yield thread
    thread.stop(lambda: None)


def test_calls_run_one_after_the_other_on_one_thread(owner: OwnerThread) -> None:
    idents: list[int] = []

    def note() -> int:
        idents.append(threading.get_ident())
        return len(idents)

    answers = [owner.call(note, what="note") for _ in range(5)]

    assert answers == [1, 2, 3, 4, 5]
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()


def test_errors_are_raised_at_the_caller(owner: OwnerThread) -> None:
    with pytest.raises(ZeroDivisionError):
        owner.call(lambda: 1 // 0, what="divide")

    assert owner.call(lambda: "alive", what="ask") == "alive"


def test_a_call_behind_a_stuck_one_gives_up_and_is_never_done(owner: OwnerThread) -> None:
    blocker, done = Blocker(owner), []

    with pytest.raises(TransferTimeoutError, match=r"owner: append waited behind another call after 0\.05 s"):
        owner.call(lambda: done.append(1), what="append", timeout_s=0.05)
    blocker.end()

    assert owner.call(lambda: list(done), what="look") == []


def test_a_result_after_the_deadline_is_discarded_on_the_thread(owner: OwnerThread) -> None:
    free = threading.Event()
    discarded: list[str] = []

    def slow() -> str:
        assert free.wait(WAIT_S)
        return "late"

    with pytest.raises(TransferTimeoutError, match="is still running in native code"):
        owner.call(slow, what="slow", discard=discarded.append, timeout_s=0.05)
    free.set()

    assert owner.call(lambda: list(discarded), what="look") == ["late"]


def test_a_result_in_time_is_not_discarded(owner: OwnerThread) -> None:
    discarded: list[int] = []

    answers = [owner.call(lambda: 1, what="one", discard=discarded.append) for _ in range(200)]

    assert sum(answers) == 200
    assert discarded == []


def test_the_tick_says_when_it_is_wanted_again() -> None:
    ticks, enough = [0], threading.Event()

    def tick() -> float | None:
        ticks[0] += 1
        if ticks[0] == 50:
            enough.set()
        return 0.0001 if ticks[0] < 50 else None

    owner = OwnerThread("ticking", tick=tick, timeout_s=WAIT_S)
    assert enough.wait(WAIT_S)
    before = owner.call(lambda: ticks[0], what="look")
    owner.stop(lambda: None)

    assert before == 50


def test_a_tick_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    def tick() -> float | None:
        raise ZeroDivisionError

    owner = OwnerThread("failing", tick=tick, timeout_s=WAIT_S)
    assert owner.call(lambda: "alive", what="ask") == "alive"
    owner.stop(lambda: None)

    assert "failing: polling reads failed" in caplog.text


def test_stopping_runs_the_last_call_once_and_refuses_later_ones(owner: OwnerThread) -> None:
    last: list[str] = []

    owner.stop(lambda: last.append("first"))
    owner.stop(lambda: last.append("second"))

    assert last == ["first"]
    assert not owner.alive
    with pytest.raises(AgentClosedError, match="open a new agent"):
        owner.call(lambda: None, what="late")


def test_calls_before_the_stop_are_still_done(owner: OwnerThread) -> None:
    blocker, done = Blocker(owner), []
    caller = threading.Thread(target=lambda: owner.call(lambda: done.append("call"), what="append"))
    caller.start()
    end = time.monotonic() + WAIT_S
    while owner._calls.qsize() == 0:
        assert time.monotonic() < end
    stopper = threading.Thread(target=lambda: owner.stop(lambda: done.append("last")))
    stopper.start()
    blocker.end()
    caller.join(WAIT_S)
    stopper.join(WAIT_S)

    assert done == ["call", "last"]


def test_stopping_a_stuck_thread_ends_by_its_deadline() -> None:
    owner = OwnerThread("stuck", tick=lambda: None, timeout_s=0.05)
    blocker = Blocker(owner)

    with pytest.raises(TransferTimeoutError, match=r"stuck did not end within 0\.05 s"):
        owner.stop(lambda: None)
    blocker.end()


def test_an_error_of_the_last_call_is_raised_by_stop() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    owner = OwnerThread("last", tick=lambda: None, timeout_s=WAIT_S)

    with pytest.raises(ZeroDivisionError):
        owner.stop(fail)
    assert not owner.alive


def test_a_forked_child_is_told_that_the_thread_stayed_behind() -> None:
    program = (
        "import os\n"
        "from kvduplex_transfer.errors import AgentClosedError\n"
        "from kvduplex_transfer.owner import OwnerThread\n"
        "owner = OwnerThread('parent', tick=lambda: None, timeout_s=20)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        owner.call(lambda: None, what='call')\n"
        "    except AgentClosedError as error:\n"
        "        os._exit(0 if 'open agents after forking' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "_, status = os.waitpid(child, 0)\n"
        "owner.stop(lambda: None)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(status))\n"
    )

    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
