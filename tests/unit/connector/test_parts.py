"""Small parts of the connector that need no engine."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest

from kvduplex_connector import compat
from kvduplex_connector.deadlines import ReadDeadlines
from kvduplex_connector.recorder import LeaseRecorder
from kvduplex_transfer.leases.errors import LeaseConfigError


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.32.1.dev3+cpu", "0.33.0"])
def test_compared_versions_are_accepted(version: str) -> None:
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "1.0.0", "dev", ""])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(LeaseConfigError, match=r"supports 0\.29 to 0\.33"):
        compat.check_version(version)


def test_totals_are_handed_out_as_what_was_added() -> None:
    recorder = LeaseRecorder()
    recorder.total("began", value=3)
    recorder.count("refused", "busy")
    recorder.gauge("held", 2)
    assert recorder.drain() == {"lease:began": [3], "lease:refused:busy": [1], "lease:held": [2]}
    recorder.total("began", value=3)
    recorder.gauge("held", 2)
    assert recorder.drain() == {}
    recorder.total("began", value=5)
    recorder.gauge("held", 0)
    assert recorder.drain() == {"lease:began": [2], "lease:held": [0]}


def test_reads_that_outlive_their_claim_are_named_with_their_blocks() -> None:
    now = [100.0]
    deadlines = ReadDeadlines(lambda: now[0])
    deadlines.begin("early", 10.0, frozenset({1, 2}))
    deadlines.begin("late", 10.0, frozenset({3}))
    now[0] = 109.4
    assert deadlines.end({"early", "unknown"}) == {}
    now[0] = 109.6
    assert deadlines.end({"early", "late"}) == {"late": frozenset({3})}
    assert deadlines.end({"late"}) == {}


def test_without_an_engine_among_the_callers_nothing_is_woken() -> None:
    assert compat.scheduler_wakeup() is None


@pytest.mark.parametrize(
    ("worker", "extra"), [(False, {}), (True, {"backends": ["LIBFABRIC"]}), (True, {"backends": ["UCX", "GDS"]})]
)
def test_only_a_worker_over_ucx_alone_has_its_progress_thread_rest(worker: bool, extra: dict[str, list[str]]) -> None:
    assert isinstance(compat.resting_agent(worker, extra), contextlib.nullcontext)


def test_without_nixl_it_is_vllm_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.nixl_utils", SimpleNamespace(NixlWrapper=None))
    assert isinstance(compat.resting_agent(True, {}), contextlib.nullcontext)
