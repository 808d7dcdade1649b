"""What importing the transfer room costs: nothing of any vendor."""

from __future__ import annotations

import subprocess
import sys

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
