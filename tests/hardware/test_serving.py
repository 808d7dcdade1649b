"""A recipe served on this host: turns are answered, and turn 2 is read back instead of computed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvduplex_bench.cluster import Cluster, started

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(7200)]

_READY_S = 6000.0


def arguments(backend: str, recipe: str) -> Sequence[str]:
    """Without prefix caching on the prefill side, so that reuse has one source only."""
    if backend == "host":
        return ("--no-prefill-prefix-cache", "--max-model-len", "4096", "--port", "18000")
    return ("--recipe", recipe, "--set", "prefill.prefix_caching=false", "--port", "18000")


@pytest.fixture(scope="module")
def cluster(accelerator: Any) -> Iterator[Cluster]:
    recipe = os.environ.get("KVDUPLEX_TEST_RECIPE", "")
    if not recipe:
        pytest.skip("set KVDUPLEX_TEST_RECIPE to a recipe for this host whose weights are here")
    command = "cpu" if accelerator.backend == "host" else accelerator.backend
    with started(arguments(accelerator.backend, recipe), timeout_s=_READY_S, backend=command) as cluster:
        yield cluster


def test_turn_two_is_read_back(cluster: Cluster) -> None:
    """The benchmark sends conversations with and without reuse, and fails when no token came over the wire."""
    prefill = [word for url in cluster.prefill for word in ("--prefill", url)]
    argv = [sys.executable, "-m", "kvduplex", "bench", "smoke", "--url", cluster.url, *prefill, "--repeats", "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
