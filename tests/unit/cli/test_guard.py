"""The guard: whatever happens to it, to the program or to the supervisor, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Marked

from kvduplex.supervise import guard

Eventually = Callable[..., None]
SLEEPER = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
# A parent that starts a child in a session of its own, which ignores SIGTERM, and waits.
FAMILY = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {STUBBORN!r}], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""


class Guarded:
    """A guard started by the test, with both ends of its pipes."""

    def __init__(self, log: Path, script: str, mark: str, *options: str) -> None:
        program = [sys.executable, "-I", "-S", "-c", script]
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, "--log", str(log), *options, "--", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "KVDUPLEX_TEST": mark},
            start_new_session=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def end(self) -> int:
        return self.process.wait(timeout=10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def run_guard(tmp_path: Path, marked: Marked) -> Iterator[Callable[..., Guarded]]:
    started: list[Guarded] = []

    def run(script: str, *options: str, grace: float = 5.0) -> Guarded:
        started.append(Guarded(tmp_path / "x.log", script, marked.mark, "--grace", str(grace), *options))
        return started[-1]

    yield run
    for guarded in started:
        guarded.close()


def test_exit_code_and_output_are_passed_on(run_guard: Callable[..., Guarded]) -> None:
    guarded = run_guard("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert guarded.line().startswith("pid ")
    assert guarded.line() == "exit 7"
    assert guarded.end() == 0
    assert sorted(guarded.log.read_text().split()) == ["err", "out"]


def test_death_by_a_signal_is_told(run_guard: Callable[..., Guarded]) -> None:
    guarded = run_guard(SLEEPER)
    os.kill(int(guarded.line().split()[1]), signal.SIGKILL)
    assert guarded.line() == "signal 9"
    assert guarded.end() == 0


def test_a_program_that_is_not_there_is_told(tmp_path: Path, marked: Marked) -> None:
    result = subprocess.run(
        [sys.executable, "-I", "-S", guard.__file__, "--log", tmp_path / "x", "--grace", "1", "--", "/no/such"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=10,
    )
    assert b"failed [Errno 2] No such file or directory: '/no/such'" in result.stdout


@pytest.mark.parametrize("end", ["stop", "lifeline", "signal"])
def test_each_way_of_asking_ends_the_program_politely(
    end: str, run_guard: Callable[..., Guarded], eventually: Eventually
) -> None:
    guarded = run_guard(
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); "
        "print('up', flush=True); time.sleep(600)"
    )
    guarded.line()
    eventually(lambda: "up" in guarded.log.read_text())
    match end:
        case "stop":
            guarded.say("stop\n")
        case "lifeline":
            assert guarded.process.stdin is not None
            guarded.process.stdin.close()
        case _:
            guarded.process.terminate()
    assert guarded.line() == "exit 3"
    assert guarded.end() == 0


def test_a_program_that_ignores_the_request_is_killed_after_the_grace(
    run_guard: Callable[..., Guarded], eventually: Eventually
) -> None:
    guarded = run_guard(STUBBORN, grace=0.3)
    guarded.line()
    eventually(lambda: "up" in guarded.log.read_text())
    guarded.say("stop\n")
    assert guarded.line() == "signal 9"
    assert guarded.end() == 0


def test_kill_does_not_wait_for_the_grace(run_guard: Callable[..., Guarded], eventually: Eventually) -> None:
    guarded = run_guard(STUBBORN, grace=600)
    guarded.line()
    eventually(lambda: "up" in guarded.log.read_text())
    guarded.say("stop\nkill\n")
    assert guarded.line() == "signal 9"
    assert guarded.end() == 0


def test_grandchildren_in_sessions_of_their_own_end_too(
    run_guard: Callable[..., Guarded], eventually: Eventually, marked: Marked
) -> None:
    guarded = run_guard(FAMILY, grace=0.3)
    guarded.line()
    eventually(lambda: "up" in guarded.log.read_text())
    assert len(marked()) == 3
    guarded.say("stop\n")
    assert guarded.line() == "signal 15"
    assert guarded.end() == 0
    assert marked() == []


def test_what_a_killed_program_leaves_is_ended_though_nobody_asked(
    run_guard: Callable[..., Guarded], eventually: Eventually, marked: Marked
) -> None:
    guarded = run_guard(FAMILY, grace=0.3)
    pid = int(guarded.line().split()[1])
    eventually(lambda: "up" in guarded.log.read_text())
    os.kill(pid, signal.SIGKILL)
    assert guarded.line() == "signal 9"
    assert guarded.end() == 0
    assert marked() == []


def test_the_program_dies_with_a_guard_that_is_killed(
    run_guard: Callable[..., Guarded], eventually: Eventually, marked: Marked
) -> None:
    guarded = run_guard(SLEEPER)
    guarded.line()
    guarded.process.kill()
    eventually(lambda: not marked(), "the program's end")


def test_folders_are_removed_at_the_end(run_guard: Callable[..., Guarded], tmp_path: Path) -> None:
    scratch = [tmp_path / "run" / name for name in "ab"]
    for folder in scratch:
        (folder / "deep").mkdir(parents=True)
    run_guard("pass", "--remove", str(scratch[0])).end()
    assert list((tmp_path / "run").iterdir()) == [scratch[1]]
    run_guard("pass", "--remove", str(scratch[1])).end()
    assert not (tmp_path / "run").exists()


def test_shared_memory_of_a_killed_program_is_removed(
    run_guard: Callable[..., Guarded], eventually: Eventually, marked: Marked
) -> None:
    path = Path("/dev/shm") / marked.mark  # noqa: S108 - where shared memory lies
    script = (
        f"import mmap, time; file = open({str(path)!r}, 'w+b'); file.truncate(4096); "
        "memory = mmap.mmap(file.fileno(), 4096); print('up', flush=True); time.sleep(600)"
    )
    try:
        guarded = run_guard(script)
        guarded.line()
        eventually(lambda: "up" in guarded.log.read_text())
        guarded.say("kill\n")
        guarded.end()
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_named_semaphores_of_a_killed_program_are_removed(
    run_guard: Callable[..., Guarded], eventually: Eventually
) -> None:
    """Nobody maps them, so only their tracker, a process that ignores SIGTERM, can tell that they exist."""
    script = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print("name", lock._semlock.name, flush=True)
time.sleep(600)
"""
    guarded = run_guard(script)
    pid = int(guarded.line().split()[1])
    eventually(lambda: "name" in guarded.log.read_text())
    path = Path("/dev/shm") / f"sem.{guarded.log.read_text().split()[1].lstrip('/')}"  # noqa: S108
    assert path.exists()
    os.kill(pid, signal.SIGKILL)
    assert guarded.line() == "signal 9"
    assert guarded.end() == 0
    assert not path.exists()


def test_the_program_inherits_no_ignored_signal(run_guard: Callable[..., Guarded]) -> None:
    guarded = run_guard("print([line for line in open('/proc/self/status') if line.startswith('SigIgn')])")
    guarded.end()
    ignored = int(guarded.log.read_text().split("\\t")[1].split("\\n")[0], 16)
    assert ignored & (1 << (signal.SIGTERM - 1) | 1 << (signal.SIGINT - 1) | 1 << (signal.SIGHUP - 1)) == 0
