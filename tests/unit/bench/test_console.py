"""Tables are whole where nothing says how wide the place is."""

from __future__ import annotations

import pytest

from kvduplex_bench.console import result_console


def test_a_file_is_wide_and_a_width_that_is_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert result_console().width == 160
    monkeypatch.setenv("COLUMNS", "70")
    assert result_console().width == 70
