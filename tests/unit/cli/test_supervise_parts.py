"""The supervisor's small parts: logs, stages, health, progress, locks."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from kvduplex.locks import LockHeldError, file_lock
from kvduplex.supervise import PlainProgress, Stage
from kvduplex.supervise.health import answers_ok
from kvduplex.supervise.live import LiveProgress
from kvduplex.supervise.logs import StageFollower, probable_cause, rotate, tail

STAGES = (Stage("alpha", "first"), Stage("beta", "second"), Stage("gamma", "third"))


class TestLogs:
    """Rotated, followed, quoted."""

    def test_rotation_keeps_three_generations(self, tmp_path: Path) -> None:
        log = tmp_path / "deep" / "x.log"
        for text in "abcdef":
            rotate(log)
            log.write_text(text)
        assert {path.name: path.read_text() for path in log.parent.iterdir()} == {
            "x.log": "f", "x.log.1": "e", "x.log.2": "d", "x.log.3": "c",
        }  # fmt: skip

    def test_tail_gives_the_last_lines(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("\n".join(map(str, range(100_000))))
        assert tail(tmp_path / "x", 2) == ["99998", "99999"]
        assert tail(tmp_path / "absent", 2) == []

    def test_stages_follow_whole_lines_and_never_go_back(self, tmp_path: Path) -> None:
        log = tmp_path / "x"
        follower = StageFollower(log, STAGES)
        assert follower.update() == "starting"
        log.write_text("alpha\nbe")
        assert follower.update() == "first"
        log.write_text("alpha\nbeta\n")
        assert follower.update() == "second"
        with log.open("a") as file:
            file.write("alpha\n")
        assert follower.update() == "second"

    def test_the_cause_is_the_first_exception_that_is_not_about_another(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text(
            "INFO all is well\n"
            "(EngineCore pid=3) ERROR 11-29 22:01:07 [core.py:1] ValueError: KV cache is too small\n"
            "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.\n"
        )
        assert probable_cause(tmp_path / "x") == "ValueError: KV cache is too small"

    def test_an_exception_of_a_package_is_named_in_full(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("pydantic_core._pydantic_core.ValidationError: 1 validation error for X\n")
        assert probable_cause(tmp_path / "x") == (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for X"
        )

    def test_no_exception_is_no_cause(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("nothing Error: here\n")
        assert probable_cause(tmp_path / "x") is None


@asynccontextmanager
async def serving(reply: bytes | None) -> AsyncIterator[str]:
    """A server that gives `reply` to everyone; None is silence."""
    release = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if reply is None:
            await release.wait()
        else:
            writer.write(reply)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health"
    finally:
        release.set()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.0 200\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"HTTP/1.1 2000 odd\r\n\r\n", False),
        (b"200\r\n", False),
        (b"\r\n", False),
        (b"", False),
        (b"x" * 100_000, False),
        (None, False),
    ],
)
async def test_only_a_200_in_time_counts_as_an_answer(reply: bytes | None, expected: bool) -> None:
    async with serving(reply) as url:
        assert await answers_ok(url, timeout_s=0.2 if reply is None else 5) is expected


async def test_nobody_there_is_no_answer(free_port: Callable[[], int]) -> None:
    assert await answers_ok(f"http://127.0.0.1:{free_port()}/health") is False


def test_plain_progress_writes_changes_once() -> None:
    now = iter([0.0, 1.0, 2.0, 3.0])
    lines: list[str] = []
    progress = PlainProgress(clock=lambda: next(now), write=lines.append)
    for label in ("loading", "loading", "warm"):
        progress.stage("decode-0", label)
    progress.ready("decode-0")
    assert lines == ["[  1.0 s] decode-0: loading", "[  2.0 s] decode-0: warm", "[  3.0 s] decode-0: ready"]


def test_live_progress_shows_every_program_and_leaves_the_terminal_alone_afterwards() -> None:
    terminal = io.StringIO()
    progress = LiveProgress(Console(file=terminal, force_terminal=True, width=80))
    progress.stage("decode-0", "loading weights")
    progress.say("a line [in brackets]")
    progress.ready("prefill-0")
    progress.close()
    progress.close()
    shown = terminal.getvalue()
    for expected in ("decode-0", "loading weights", "a line [in brackets]", "prefill-0", "ready"):
        assert expected in shown


class TestLock:
    """Held by one, released by death, removed on request."""

    def test_a_held_lock_is_refused_with_its_holder(self, tmp_path: Path) -> None:
        lock = tmp_path / "x"
        with file_lock(lock), pytest.raises(LockHeldError, match=r"x is locked by process \d+$"), file_lock(lock):
            pytest.fail("both hold it")

    def test_waiting_ends_at_the_deadline(self, tmp_path: Path) -> None:
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        second = file_lock(tmp_path / "x", timeout_s=3, clock=lambda: now[0], sleep=sleep)
        with file_lock(tmp_path / "x"), pytest.raises(LockHeldError), second:
            pytest.fail("both hold it")
        assert 3 <= now[0] < 3.1

    def test_waiting_ends_when_the_holder_lets_go(self, tmp_path: Path) -> None:
        first = ExitStack()
        first.enter_context(file_lock(tmp_path / "x", remove=True))
        with file_lock(tmp_path / "x", timeout_s=9, sleep=lambda _: first.close()):
            assert (tmp_path / "x").exists()

    def test_a_file_that_was_removed_meanwhile_does_not_count_as_held(self, tmp_path: Path) -> None:
        with file_lock(tmp_path / "x", remove=True):
            pass
        assert not (tmp_path / "x").exists()
        with file_lock(tmp_path / "x", remove=True):
            assert (tmp_path / "x").exists()
