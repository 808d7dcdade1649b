"""NIXL's progress thread: it sleeps while there is nothing to do, and agents of other backends are left alone."""

from __future__ import annotations

import sys
import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from kvduplex_transfer.host import HostBackend
from kvduplex_transfer.native import NativeAgent
from kvduplex_transfer.progress import PROGRESS_DELAY_US, resting_progress


class Config:
    """As NIXL's binding, where the delay is a property of a class of C++."""

    def __init__(self) -> None:
        self._delay = 0

    @property
    def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
        return self._delay

    @pthrDelay.setter
    def pthrDelay(self, value: int) -> None:  # noqa: N802
        self._delay = value


def agent_class(monkeypatch: pytest.MonkeyPatch, **bindings: Any) -> tuple[type, Any]:
    name = f"nixl_{uuid.uuid4().hex}"
    module = SimpleNamespace(nixlBind=SimpleNamespace(**bindings))
    monkeypatch.setitem(sys.modules, name, module)
    return type("nixl_agent", (), {"__module__": name}), module


def test_a_delay_of_zero_becomes_one_and_a_longer_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, module = agent_class(monkeypatch, nixlAgentConfig=Config)
    with resting_progress(agent, ["UCX"]):
        made = [module.nixlBind.nixlAgentConfig(), module.nixlBind.nixlAgentConfig()]
    made[0].pthrDelay = 0
    made[1].pthrDelay = 10 * PROGRESS_DELAY_US
    assert [config.pthrDelay for config in made] == [PROGRESS_DELAY_US, 10 * PROGRESS_DELAY_US]
    assert module.nixlBind.nixlAgentConfig is Config


def test_what_was_there_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, module = agent_class(monkeypatch, nixlAgentConfig=Config)
    with pytest.raises(RuntimeError), resting_progress(agent, ["UCX"]):
        raise RuntimeError
    assert module.nixlBind.nixlAgentConfig is Config


@pytest.mark.parametrize("backends", [["LIBFABRIC"], ["UCX", "LIBFABRIC"], []])
def test_with_other_backends_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, backends: list[str]) -> None:
    agent, module = agent_class(monkeypatch, nixlAgentConfig=Config)
    with resting_progress(agent, backends):
        assert module.nixlBind.nixlAgentConfig is Config


@pytest.mark.parametrize("bindings", [{}, {"nixlAgentConfig": object}])
def test_a_nixl_without_such_a_delay_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bindings: dict[str, Any]
) -> None:
    agent, module = agent_class(monkeypatch, **bindings)
    with resting_progress(agent, ["UCX"]):
        assert vars(module.nixlBind) == bindings
    assert "may take a core" in caplog.text


def test_an_idle_agent_takes_no_core() -> None:
    pytest.importorskip("nixl")
    agent = NativeAgent(uuid.uuid4().hex, HostBackend().nixl_settings())
    agent.start()
    try:
        began, used = time.monotonic(), time.process_time()
        time.sleep(1.0)
        share = (time.process_time() - used) / (time.monotonic() - began)
    finally:
        agent.destroy()
    assert share < 0.2
