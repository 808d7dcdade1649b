"""An agent takes what it needs and gives all of it back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kvduplex_transfer.errors import AgentClosedError, ConfigError
from kvduplex_transfer.interface import BlockRef, MemoryRegion, TransferAgent, TransferBackend

if TYPE_CHECKING:
    from tests.contract.conftest import Connect, Memory, Opened, Receive


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.iterdir would count its own


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_thousand_reads_leave_nothing_behind(
    reader: TransferAgent, owner: TransferAgent, memory: Callable[..., Memory], connect: Connect, receive: Receive
) -> None:
    local, far, peer = memory(reader, 256 * 1024), memory(owner, 256 * 1024, seed=70), connect(reader, owner)

    def read(times: int) -> None:
        for number in range(times):
            blocks = [number % 64, (number + 31) % 64]
            notify = b"read" if number % 10 == 0 else None
            handle = reader.read(peer, far.blocks(blocks, 4096), local.blocks(blocks, 4096), notify=notify)
            reader.wait(handle, 20.0)
            reader.release(handle)
        assert len(receive(owner, times // 10)) == times // 10

    read(100)
    before = descriptors(), threads(), psutil.Process().memory_info().rss
    read(1000)
    gc.collect()
    after = descriptors(), threads(), psutil.Process().memory_info().rss

    assert after[:2] == before[:2]
    assert after[2] - before[2] < 16 << 20


def test_agents_that_come_and_go_leave_nothing_behind(
    opened: Opened, memory: Callable[..., Memory], eventually: Callable[..., None]
) -> None:
    def live() -> None:
        with opened.backend.open("first") as first, opened.backend.open("second") as second:
            far = memory(second, 4096, seed=71)
            near = memory(first, 4096)
            peer = first.add_peer(second.metadata())
            first.wait(first.read(peer, [far.block(0, 4096)], [near.block(0, 4096)]), 20.0)
            with pytest.raises(Exception, match="outside registered memory"):
                first.read(peer, [far.block(0, 8192)], [near.block(0, 8192)])

    live()
    gc.collect()
    before = descriptors(), threads()
    for _ in range(3):
        live()
    gc.collect()

    # A thread that was joined stays in /proc for an instant.
    eventually(lambda: (descriptors(), threads()) == before, f"back to {before} descriptors and threads")


def test_a_closed_agent_refuses_everything_but_closing(opened: Opened, memory: Callable[..., Memory]) -> None:
    agent, other = opened.agent(), opened.agent()
    far, near = memory(other, 64), memory(agent, 64)
    peer = agent.add_peer(other.metadata())
    handle = agent.read(peer, [far.block(0, 64)], [near.block(0, 64)])
    agent.wait(handle, 20.0)
    agent.close()
    agent.close()
    region = MemoryRegion(near.address, 64)

    calls: list[Callable[[], object]] = [
        lambda: agent.register([region]),
        lambda: agent.deregister(near.regions),
        agent.metadata,
        lambda: agent.add_peer(other.metadata()),
        lambda: agent.remove_peer(peer),
        lambda: agent.read(peer, [BlockRef(far.address, 8)], [BlockRef(near.address, 8)]),
        lambda: agent.poll(handle),
        lambda: agent.wait(handle, 1.0),
        lambda: agent.release(handle),
        lambda: agent.notify(peer, b"hello"),
        agent.notifications,
    ]
    for call in calls:
        with pytest.raises(AgentClosedError, match="closed"):
            call()


def test_leaving_a_block_closes_the_agent_and_frees_its_memory(opened: Opened, memory: Callable[..., Memory]) -> None:
    with opened.agent() as agent:
        near = memory(agent, 64)
    with pytest.raises(AgentClosedError):
        agent.metadata()

    again = opened.agent()
    again.deregister(again.register([MemoryRegion(near.address, 64)]))


def test_an_agent_runs_on_what_its_backend_asked_for(opened: Opened, reader: TransferAgent) -> None:
    settings = opened.backend.nixl_settings()

    opened.backend.verify_agent(reader)

    assert set(settings.backends) <= set(reader.facts.backends)
    assert set(settings.backends) <= set(reader.facts.plugins)
    assert all(settings.memory_type in reader.facts.backends[name] for name in settings.backends)


def test_backend_and_agent_are_what_the_interface_says(opened: Opened, reader: TransferAgent) -> None:
    assert isinstance(opened.backend, TransferBackend)
    assert isinstance(reader, TransferAgent)
    assert opened.backend.name == opened.case.backend


@pytest.mark.parametrize("name", ["", "a@b", "new\nline", "x" * 201])
def test_a_name_that_peers_could_not_tell_apart_is_refused(opened: Opened, name: str) -> None:
    with pytest.raises(ConfigError, match="agent name"):
        opened.backend.open(name)


def test_an_agent_that_nobody_closed_does_not_hold_up_the_interpreter(opened: Opened) -> None:
    program = (
        "from importlib.metadata import entry_points\n"
        f"(entry,) = entry_points(group='kvduplex.backends', name={opened.case.backend!r})\n"
        "agent = entry.load()().open('left-open')\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (0, "")
