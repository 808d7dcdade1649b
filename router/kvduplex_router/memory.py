"""Gives freed memory back to the system, where the C library can."""

from __future__ import annotations

import ctypes
import gc
import sys

__all__ = ["trim_memory"]


def trim_memory() -> None:
    """Collect garbage and return free heap pages; takes tens of milliseconds, so for rare moments only."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
