"""What importing the transfer room costs: nothing of any vendor."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import kvduplex_transfer

MODULES = "agent host hostview interface engine opening blocks"


def test_no_vendor_package_is_imported_before_an_agent_is_opened() -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {MODULES.split()!r}: importlib.import_module(f'kvduplex_transfer.{{name}}')\n"
        "from kvduplex_transfer.host import HostBackend\n"
        "HostBackend().nixl_settings()\n"
        "print(sorted({'nixl', 'nixl_cu12', 'nixl_cu13', 'torch', 'vllm'} & set(sys.modules)))\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"


def test_what_is_public_is_listed_and_there() -> None:
    names = [module.name for module in pkgutil.iter_modules(kvduplex_transfer.__path__, "kvduplex_transfer.")]
    assert {f"kvduplex_transfer.{name}" for name in MODULES.split()} <= set(names)

    for name in names:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None)
        if public is None:
            assert hasattr(module, "__path__"), f"{name} has no __all__"
            continue
        assert len(set(public)) == len(public)
        assert all(hasattr(module, item) for item in public), name
