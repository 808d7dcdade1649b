"""Open a NIXL agent in a process of its own and print what it got, as JSON.

Run as ``python -m kvduplex_transfer.hostchecks.agentprobe BACKEND`` by the doctor: opening an agent loads vendor
libraries, which neither the doctor itself nor an engine that is to fork later may do.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from kvduplex_transfer.hostchecks.rails import open_rails
from kvduplex_transfer.nixlwheel import import_nixl

__all__ = ["main"]


def main(backend: str) -> int:
    """Print the outcome of opening an agent with `backend`; 0 when the backend came up."""
    outcome = _open(backend)
    sys.stdout.write(json.dumps(outcome) + "\n")
    return 0 if outcome["error"] is None else 1


def _open(backend: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {"backend": backend, "error": None, "memory_types": [], "rails": 0}
    try:
        api = import_nixl()
        agent = api.nixl_agent(f"kvduplex-doctor-{os.getpid()}", api.nixl_agent_config(backends=[backend]))
        if backend not in agent.backends:  # NIXL skips a plugin that is missing, and only logs it
            outcome["error"] = f"NIXL has no plugin {backend}"
        else:
            outcome["memory_types"] = sorted(agent.get_backend_mem_types(backend))
            outcome["rails"] = open_rails()
    except Exception as error:  # noqa: BLE001 - the boundary of this process: whatever it was is the answer
        outcome["error"] = f"{type(error).__name__}: {error}"
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "UCX"))
