"""Resolves the project's dependencies once and writes the pins that `make setup` installs.

Run by `make lock` from the engine environment. One resolution over every extra keeps the files consistent; the
split puts what only the engine needs into engine-cpu.txt, so that the fast suite runs without it, and what only the
CDK app needs into infra.txt.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LOCKS = Path(__file__).parent / "locks"
ROOT = Path(__file__).parent.parent
# Their newest builds do not load beside the CPU build of torch 2.13 ("operator torchvision::nms does not exist"), and
# the engine runs without them. The CUDA 13 build of NIXL is a second copy of the same host transports.
KEPT_OUT = {"torchvision", "torchaudio", "torchcodec", "nixl-cu13", "kvduplex"}
# NIXL is the transfer room's own and small enough; its contract tests belong to the fast suite.
BASE_TOO = {"nixl", "nixl-cu12"}
BUILD = ["hatchling", "editables"]


def resolve(extras: str) -> dict[str, str]:
    """Pins of one pip resolution, by package name as pip reports it, plus torch's local version label."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), f"{ROOT}[{extras}]", *BUILD]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in found}


def write(path: Path, pins: dict[str, str], title: str) -> None:
    """Write one sorted pin file."""
    lines = [f"# {title}", "# Written by `make lock`; do not edit.", *(f"{n}=={v}" for n, v in sorted(pins.items()))]
    path.write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"{path.relative_to(ROOT)}: {len(pins)} packages\n")


def main() -> None:
    """Resolve everything, then name what is left once the engine is taken out."""
    everything = resolve("router,bench,dev,aws,infra,engine-cpu")
    without_engine = set(resolve("router,bench,dev,aws")) | BASE_TOO
    with_engine = set(resolve("router,bench,dev,aws,engine-cpu")) | BASE_TOO
    pins = {name: version for name, version in everything.items() if name not in KEPT_OUT}
    if "+cpu" not in pins["torch"]:
        raise SystemExit(
            f"torch resolved to {pins['torch']}, not a CPU build: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index"
        )
    LOCKS.mkdir(exist_ok=True)
    base = {name: version for name, version in pins.items() if name in without_engine}
    engine = {name: version for name, version in pins.items() if name in with_engine - without_engine}
    infra = {name: version for name, version in pins.items() if name not in with_engine}
    write(LOCKS / "base.txt", base, "Everything but the engine: router, command line, benchmarks, tests, docs.")
    write(LOCKS / "engine-cpu.txt", engine, "The engine, CPU build; on top of base.txt.")
    write(LOCKS / "infra.txt", infra, "The CDK app and its tests; on top of the others.")


if __name__ == "__main__":
    main()
