"""The door to NIXL, where no NIXL is needed to see what it does."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvduplex_transfer.errors import BackendUnavailableError, TransferFailedError
from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.interface import MemoryType
from kvduplex_transfer.native import NativeAgent, NativeRead, _keep_stdout_clean


class Inner:
    """What NIXL's handles refer to."""


class Released:
    def __init__(self) -> None:
        self.times = 0

    def release(self) -> None:
        self.times += 1


def native(agent: Any) -> NativeAgent:
    made = NativeAgent("d0@1", HostBackend().nixl_settings())
    made._agent = agent
    return made


def test_an_agent_that_is_still_referred_to_is_not_called_destroyed() -> None:
    inner = Inner()

    with pytest.raises(TransferFailedError, match="'d0@1' is still referred to and goes on"):
        native(SimpleNamespace(agent=inner)).destroy()


def test_an_agent_that_nothing_refers_to_is_destroyed_even_in_a_cycle() -> None:
    inner = Inner()
    inner.itself = inner  # type: ignore[attr-defined]
    agent = native(SimpleNamespace(agent=inner))
    del inner

    agent.destroy()
    agent.destroy()


def test_a_read_that_cannot_be_posted_lets_go_of_its_handle() -> None:
    handle = Released()

    def refuse(_: object) -> str:
        raise RuntimeError("posting failed")

    agent = native(
        SimpleNamespace(
            get_xfer_descs=lambda rows, _: rows, initialize_xfer=lambda *_: handle, transfer=refuse, agent=None
        )
    )

    with pytest.raises(RuntimeError) as caught:
        agent.start_read("d1@1", (MemoryType.DRAM, MemoryType.DRAM), [], [], b"")  # type: ignore[arg-type]

    assert handle.times == 1
    traceback = caught.value.__traceback__
    while traceback is not None:
        kept = [value for value in traceback.tb_frame.f_locals.values() if isinstance(value, NativeRead)]
        assert all(read.handle is None for read in kept)
        traceback = traceback.tb_next


def test_a_released_read_lets_go_of_its_handle() -> None:
    handle, read = Released(), NativeRead(None)
    read.handle = handle

    native(SimpleNamespace(release_xfer_handle=lambda given: given.release())).release(read)

    assert (handle.times, read.handle) == (1, None)


def test_a_plugin_that_is_not_there_is_named_with_those_that_are() -> None:
    agent = native(SimpleNamespace(get_plugin_list=lambda: ["UCX", "POSIX"]))

    with pytest.raises(BackendUnavailableError, match=r"no plugin 'LIBFABRIC', only POSIX, UCX; .*NIXL_PLUGIN_DIR"):
        agent._start_backend("LIBFABRIC", {})


def test_nixl_does_not_write_between_the_results_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("nixl")
    handler = logging.StreamHandler(sys.stdout)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.delenv("NIXL_LOG_LEVEL", raising=False)

    _keep_stdout_clean()

    assert handler.stream is sys.stderr
    assert not logger.isEnabledFor(logging.INFO)
