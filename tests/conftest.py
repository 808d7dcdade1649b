"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine than about the code; benchmarks keep the timing bars.
settings.register_profile("kvduplex", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvduplex")

_NOBODY = 65534


@pytest.fixture
def hidden(tmp_path: Path) -> Iterator[Path]:
    """A folder that this test's user may not enter, also where the tests are run by root."""
    folder = tmp_path / "hidden"
    folder.mkdir(mode=0)
    before = os.getresuid()
    if before[1] == 0:
        os.setresuid(_NOBODY, _NOBODY, 0)  # root's rights come back through the saved id
    try:
        yield folder
    finally:
        os.setresuid(*before)
        folder.chmod(0o700)
