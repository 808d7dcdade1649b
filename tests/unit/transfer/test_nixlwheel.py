"""NIXL is found without torch where that can be, and as NIXL itself would find it where not."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from kvduplex_transfer.nixlwheel import import_nixl, torch_lacks_cuda


def pretend_torch(monkeypatch: pytest.MonkeyPatch, origin: str | None, *, installed: bool = True) -> None:
    spec = importlib.machinery.ModuleSpec("torch", None, origin=origin) if installed else None
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else real(name))


@pytest.mark.parametrize(
    ("line", "without"),
    [
        ("cuda: Optional[str] = None", True),
        ("cuda = None", True),
        ("cuda: Optional[str] = '13.0'", False),
        ("cuda = '12.8'", False),
        ("hip = None", False),
    ],
)
def test_the_version_file_of_torch_is_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, without: bool
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\n")
    pretend_torch(monkeypatch, str(tmp_path / "__init__.py"))

    assert torch_lacks_cuda() is without


def test_no_torch_has_no_cuda_and_an_odd_one_may_have_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_torch(monkeypatch, None, installed=False)
    assert torch_lacks_cuda()
    pretend_torch(monkeypatch, None)
    assert not torch_lacks_cuda()
    pretend_torch(monkeypatch, str(tmp_path / "__init__.py"))
    assert not torch_lacks_cuda()


def test_where_torch_may_have_cuda_nixl_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = cast("dict[str, Any]", sys.modules)
    chosen = object()
    monkeypatch.setitem(modules, "torch", object())
    monkeypatch.setitem(modules, "nixl", object())
    monkeypatch.setitem(modules, "nixl._api", chosen)

    assert import_nixl() is cast("Any", chosen)


def test_what_is_imported_is_what_nixl_would_have_chosen() -> None:
    pytest.importorskip("nixl")
    program = (
        "import sys\n"
        "from kvduplex_transfer.nixlwheel import import_nixl, torch_lacks_cuda\n"
        "ours, lean = import_nixl(), torch_lacks_cuda()\n"
        "assert not lean or 'torch' not in sys.modules\n"
        "import nixl._api\n"
        "assert nixl._api is ours, (nixl._api, ours)\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=90)
