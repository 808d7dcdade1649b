"""What an agent opened on this host got: the doctor's last word on silent fallbacks."""

from __future__ import annotations

import json
from typing import Any

from kvduplex_transfer.hostchecks.findings import fail, ok
from kvduplex_transfer.interface import Finding, Host, MemoryType

__all__ = ["check_agent"]

_DEADLINE_S = 4.0  # opening one takes well under a second; the doctor as a whole promises 5
_PROBE = "kvduplex_transfer.hostchecks.agentprobe"


def check_agent(
    host: Host, interpreter: str, *, backend: str, memory: MemoryType, variables: dict[str, str]
) -> list[Finding]:
    """Open an agent in a process of its own and compare what it got with what was asked for.

    Args:
        host: Machine to run on.
        interpreter: Python of the engines.
        backend: NIXL plugin, e.g. ``LIBFABRIC``.
        memory: Memory type that it must support.
        variables: Environment of the agent, beyond the inherited one.
    """
    settings = [f"{name}={value}" for name, value in sorted(variables.items())]
    result = host.run(["env", *settings, interpreter, "-m", _PROBE, backend], timeout_s=_DEADLINE_S)
    outcome = _parsed(result.stdout)
    expected = f"backend {backend} with {memory}" + (" over EFA" if backend == "LIBFABRIC" else "")
    if outcome is None:
        seen = f"status {result.returncode}: {_last_line(result.stderr)}"
        why, fix = "no agent could be opened, so no KV can move", "mend the findings above, then run the doctor again"
        return [fail("nixl.agent", seen, expected, why=why, fix=fix)]
    return [_judge(outcome, backend, memory, expected)]


def _judge(outcome: dict[str, Any], backend: str, memory: MemoryType, expected: str) -> Finding:
    if outcome["error"] is not None:
        return fail(
            "nixl.agent",
            str(outcome["error"]),
            expected,
            why="engines of this host would end while starting",
            fix="mend the nixl and efa findings above; NIXL_LOG_LEVEL=debug shows which library is missing",
        )
    types = [str(kind).partition("_")[0] for kind in outcome["memory_types"]]
    seen = f"{backend} with {', '.join(types) or 'nothing'}, {outcome['rails']} RDMA devices open"
    if memory.value not in types:
        return fail(
            "nixl.agent",
            seen,
            expected,
            why="the plugin came up on a provider, such as TCP, that cannot reach device memory",
            fix="mend the efa findings above; FI_PROVIDER=efa makes it fail instead of falling back",
        )
    if backend == "LIBFABRIC" and not outcome["rails"]:
        return fail(
            "nixl.agent",
            seen,
            expected,
            why="no RDMA device is open: transfers would run over TCP",
            fix="mend the efa findings above; FI_PROVIDER=efa makes it fail instead of falling back",
        )
    return ok("nixl.agent", seen, expected)


def _parsed(stdout: str) -> dict[str, Any] | None:
    for line in reversed(stdout.splitlines()):
        try:
            outcome = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(outcome, dict) and {"error", "memory_types", "rails"} <= outcome.keys():
            return outcome
    return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:160] if lines else "no output"
