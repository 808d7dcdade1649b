"""Tasks beside each other: results, failures, and nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import pytest

from kvduplex_bench.errors import BenchError
from kvduplex_bench.routing.beside import run_beside
from kvduplex_bench.sim.core.timing import load_timing


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process stays that a test started; multiprocessing's own helper does, and so do those of other tests."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert [each for each in left if "resource_tracker" not in " ".join(each.cmdline())] == []


def test_results_come_with_their_places_as_they_are_done() -> None:
    seen: list[tuple[int, int]] = []
    run_beside([partial(pow, 2, 10), partial(pow, 3, 2), partial(pow, 5, 2)], 2, lambda *found: seen.append(found))
    assert sorted(seen) == [(0, 1024), (1, 9), (2, 25)]


def test_an_error_of_one_ends_the_others_and_keeps_its_words() -> None:
    began = time.monotonic()
    tasks: list[Callable[[], object]] = [partial(time.sleep, 60), partial(load_timing, "no-such-profile")]
    with pytest.raises(BenchError, match="no-such-profile"):
        run_beside(tasks, 2, lambda *_: None)
    assert time.monotonic() - began < 30


def test_a_process_that_dies_is_an_error_and_not_waited_for() -> None:
    tasks: list[Callable[[], object]] = [partial(os._exit, 3), partial(time.sleep, 60)]
    with pytest.raises(BenchError, match="status 3 and no result"):
        run_beside(tasks, 2, lambda *_: None)
