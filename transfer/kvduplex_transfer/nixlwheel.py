"""Which of NIXL's wheels to import, found out without importing torch.

The package ``nixl`` only chooses between ``nixl_cu13`` and ``nixl_cu12``. Where torch was built without CUDA it imports
torch to learn that (``nixl_meta_utils`` of 1.5.1): a second of processor time and 200 MB for every command that opens
an agent. There any wheel will do, so the first is taken as ``nixl`` would.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["import_nixl", "torch_lacks_cuda"]

_WHEELS = ("nixl_cu13", "nixl_cu12")  # the order in which ``nixl`` falls back


def import_nixl() -> ModuleType:
    """NIXL's Python interface.

    Raises:
        ImportError: NIXL is not installed, or does not load.
    """
    # A torch that is imported is cheap for ``nixl`` to ask, and one with CUDA must be asked, for its version matters.
    if "torch" not in sys.modules and torch_lacks_cuda():
        for wheel in _WHEELS:
            if importlib.util.find_spec("nixl") is not None and importlib.util.find_spec(wheel) is not None:
                return importlib.import_module(f"{wheel}._api")
    return importlib.import_module("nixl._api")


def torch_lacks_cuda() -> bool:
    """Whether the installed torch says in its version file that it was built without CUDA; also without any torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return spec is None
    try:
        version = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*= *None", version, re.MULTILINE) is not None
