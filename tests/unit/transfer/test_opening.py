"""An agent that came up on less than was asked for is refused, and one that cannot come up says what is missing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest

from kvduplex_transfer.errors import BackendUnavailableError, SilentFallbackError
from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.interface import AgentFacts, MemoryType, NixlSettings, TransferAgent
from kvduplex_transfer.opening import refuse_fallback

DRAM, VRAM = MemoryType.DRAM, MemoryType.VRAM


@dataclass(frozen=True)
class Facts:
    """As much of an agent as is looked at."""

    facts: AgentFacts
    name: str = "d0"


def agent(backends: Mapping[str, tuple[MemoryType, ...]]) -> TransferAgent:
    return cast("TransferAgent", Facts(AgentFacts(backends, {}, ("POSIX", "UCX"))))


def settings(*backends: str, memory: MemoryType = DRAM) -> NixlSettings:
    return NixlSettings(backends={name: {} for name in backends}, memory_type=memory, kv_buffer_device="cpu")


def test_what_was_asked_for_is_accepted() -> None:
    refuse_fallback(agent({"UCX": (DRAM, VRAM), "POSIX": ()}), settings("UCX"))


def test_a_backend_that_did_not_start_is_refused() -> None:
    with pytest.raises(
        SilentFallbackError,
        match=r"'d0' runs UCX instead of LIBFABRIC: LIBFABRIC did not start; plugins found: POSIX, UCX",
    ):
        refuse_fallback(agent({"UCX": (DRAM,)}), settings("LIBFABRIC"))
    with pytest.raises(SilentFallbackError, match="runs nothing instead of UCX"):
        refuse_fallback(agent({}), settings("UCX"))


def test_a_backend_that_lost_its_device_memory_is_refused() -> None:
    with pytest.raises(SilentFallbackError, match="LIBFABRIC came up for DRAM memory, not for VRAM"):
        refuse_fallback(agent({"LIBFABRIC": (DRAM,)}), settings("LIBFABRIC", memory=VRAM))


def test_a_missing_nixl_names_the_extra_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(cast("dict[str, Any]", sys.modules), name, None)
    before = threading.active_count()

    with pytest.raises(BackendUnavailableError, match=r"NIXL cannot be imported .*pip install 'kvduplex\[engine-cpu\]"):
        HostBackend().open("p0")

    assert threading.active_count() == before
