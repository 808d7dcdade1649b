"""The supervisor, over real programs: ready, dead while loading, dead later, stubborn, and nothing left after any."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.cli.conftest import SERVER, Marked

from kvduplex.errors import EngineFailedError
from kvduplex.supervise import PlainProgress, Stage, Unit, supervise
from kvduplex.supervise.cluster import Cluster

MakeUnit = Callable[..., Unit]
SERVE = f"{SERVER}\nserver.serve_forever()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SERVE}"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def environment(marked: Marked) -> dict[str, str]:
    return {**os.environ, "KVDUPLEX_TEST": marked.mark}


@pytest.fixture
def cluster(environment: dict[str, str], said: list[str]) -> Cluster:
    return Cluster(environment=environment, progress=PlainProgress(write=said.append), grace_s=5)


@pytest.fixture
def run(environment: dict[str, str], said: list[str]) -> Callable[..., Awaitable[None]]:
    """Supervises waves; `ready` is called when all answer."""

    async def supervised(*waves: list[Unit], ready: Callable[..., None] = lambda _: None, **other: Any) -> None:
        values = {"timeout_s": 20.0, "grace_s": 5.0, **other}
        progress = PlainProgress(write=said.append)
        await supervise(waves, environment=environment, progress=progress, on_ready=ready, **values)

    return supervised


@pytest.fixture(autouse=True)
def _nothing_left(marked: Marked) -> Iterator[None]:
    yield
    assert marked() == []


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_waves_start_in_order_and_end_when_asked(
    run: Callable[..., Awaitable[None]], make_unit: MakeUnit, said: list[str]
) -> None:
    pids: dict[str, int] = {}
    units = [make_unit(SERVE, name) for name in ("prefill-0", "decode-0", "router")]

    def ready(found: dict[str, int]) -> None:
        pids.update(found)
        assert all(Path(f"/proc/{pid}").exists() for pid in found.values())
        stop_self()

    await run(units[:2], units[2:], ready=ready)
    assert list(pids) == ["prefill-0", "decode-0", "router"]
    told = [line.partition("] ")[2] for line in said]
    assert told.index("router: starting") > max(told.index("prefill-0: ready"), told.index("decode-0: ready"))
    assert told[-1].startswith("stopping")


async def test_stages_are_read_from_the_log(
    run: Callable[..., Awaitable[None]], make_unit: MakeUnit, said: list[str]
) -> None:
    stages = (Stage("loading weights", "loading weights"), Stage("never said", "never reached"))
    await run([make_unit(SERVE, stages=stages)], ready=lambda _: stop_self())
    assert any("decode-0: loading weights" in line for line in said)
    assert not any("never reached" in line for line in said)


async def test_death_while_loading_names_stage_cause_and_log(
    run: Callable[..., Awaitable[None]], make_unit: MakeUnit
) -> None:
    doomed = make_unit(
        "import time; print('loading weights', flush=True); time.sleep(0.5); raise ValueError('no such tensor')",
        "decode-1",
        stages=(Stage("loading weights", "loading weights"),),
    )
    with pytest.raises(EngineFailedError) as raised:
        await run([make_unit(SERVE), doomed])
    message = str(raised.value)
    assert message.startswith("decode-1 ended with exit code 1 while loading weights; everything else was stopped.")
    assert "Its log names: ValueError: no such tensor" in message
    assert f"Last lines of {doomed.log}:\n  loading weights" in message


async def test_death_when_ready_ends_the_rest(run: Callable[..., Awaitable[None]], make_unit: MakeUnit) -> None:
    def ready(pids: dict[str, int]) -> None:
        os.kill(pids["prefill-0"], signal.SIGKILL)

    with pytest.raises(EngineFailedError, match=r"^prefill-0 was killed by SIGKILL; everything else was stopped"):
        await run([make_unit(SERVE, "prefill-0"), make_unit(SERVE)], ready=ready)


async def test_a_program_that_never_answers_is_given_up_on(
    run: Callable[..., Awaitable[None]], make_unit: MakeUnit
) -> None:
    with pytest.raises(EngineFailedError, match=r"^decode-0 was not ready after 0\.5 s \(stage: starting\).*--timeout"):
        await run([make_unit("import time; time.sleep(600)")], timeout_s=0.5)


async def test_a_program_that_cannot_be_started_is_an_error(
    run: Callable[..., Awaitable[None]], make_unit: MakeUnit
) -> None:
    with pytest.raises(EngineFailedError, match=r"^decode-0 could not be started: .*No such file"):
        await run([make_unit("", argv=("/no/such/program",))])


async def test_stubborn_programs_are_killed_after_the_grace(
    run: Callable[..., Awaitable[None]], make_unit: MakeUnit
) -> None:
    await run([make_unit(STUBBORN)], ready=lambda _: stop_self(), grace_s=0.3)


async def test_a_second_signal_shortens_the_grace(run: Callable[..., Awaitable[None]], make_unit: MakeUnit) -> None:
    def ready(_: dict[str, int]) -> None:
        stop_self()
        asyncio.get_running_loop().call_later(0.2, stop_self)

    async with asyncio.timeout(60):
        await run([make_unit(STUBBORN)], ready=ready, grace_s=600)


async def test_a_signal_while_loading_ends_everything(
    run: Callable[..., Awaitable[None]], make_unit: MakeUnit, said: list[str]
) -> None:
    asyncio.get_running_loop().call_later(0.3, stop_self)
    await run([make_unit("import time; time.sleep(600)")], ready=lambda _: pytest.fail("it never was ready"))
    assert "stopping" in said[-1]


async def test_a_failing_callback_ends_everything(run: Callable[..., Awaitable[None]], make_unit: MakeUnit) -> None:
    def ready(_: dict[str, int]) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="terminal"):
        await run([make_unit(SERVE)], ready=ready)


async def test_a_killed_guard_is_noticed_and_its_family_ended(
    cluster: Cluster, make_unit: MakeUnit, eventually: Callable[..., None]
) -> None:
    script = f"import os\nif os.fork() == 0:\n    import time; time.sleep(600)\n{SERVE}"
    await cluster.start([make_unit(script)], timeout_s=20)
    os.kill(psutil.Process(cluster.pids["decode-0"]).ppid(), signal.SIGKILL)
    with pytest.raises(EngineFailedError, match="left by its guard"):
        await cluster.watch()
    await cluster.close()


async def test_scratch_is_made_for_the_program_and_removed(
    cluster: Cluster, make_unit: MakeUnit, tmp_path: Path
) -> None:
    scratch = tmp_path / "run" / "decode-0"
    scratch.mkdir(parents=True)
    (scratch / "of an earlier run").touch()
    unit = make_unit(f"import os; print(os.listdir({str(scratch)!r}), flush=True)\n{SERVE}", scratch=scratch)
    await cluster.start([unit], timeout_s=20)
    assert unit.log.read_text().startswith("[]")
    await cluster.close()
    assert not scratch.exists()


async def test_logs_of_earlier_starts_are_kept(cluster: Cluster, make_unit: MakeUnit) -> None:
    unit = make_unit(SERVE)
    unit.log.parent.mkdir()
    unit.log.write_text("earlier")
    await cluster.start([unit], timeout_s=20)
    await cluster.close()
    assert unit.log.with_name("decode-0.log.1").read_text() == "earlier"
    assert "loading weights" in unit.log.read_text()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_threads_that_strayed_are_brought_back_and_free_ones_left(cluster: Cluster, make_unit: MakeUnit) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0))
    stray = f"""
import os, threading
free = threading.Thread(target=lambda: server.serve_forever())
free.start()
os.sched_setaffinity(0, {{{last}}})
free.join()
"""
    await cluster.start([make_unit(SERVER + stray, cores=frozenset({first}))], timeout_s=20)
    tasks = [int(entry.name) for entry in Path(f"/proc/{cluster.pids['decode-0']}/task").iterdir()]  # noqa: ASYNC240
    main, free = sorted(tasks)[:2]  # another may be answering a probe
    affinities = [os.sched_getaffinity(task) for task in (main, free)]
    assert affinities == [{first}, os.sched_getaffinity(0)]
    await cluster.close()


async def test_closing_without_a_start_is_fine(cluster: Cluster) -> None:
    await cluster.close()
