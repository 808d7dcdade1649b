"""Write the image manifest: every version and every checksum that went into the image, as JSON on standard output.

Runs inside the image with its own interpreter and the standard library alone. The content depends on nothing but the
image, so that the same image gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path

_LIST_PACKAGES = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}))"
)


def main() -> None:
    """Print the manifest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    for name in ("flavour", "version", "parent", "engine-python"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    json.dump(_manifest(options), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")


def _manifest(options: argparse.Namespace) -> dict[str, object]:
    return {
        "schema": 1,
        "flavour": options.flavour,
        "version": options.version,
        "parent_image": options.parent or None,
        "operating_system": _os_name(),
        "machine": platform.machine(),
        "engine_python": options.engine_python,
        "efa_installer": _efa_version(),
        "debian_packages": _debian_packages(),
        "held_packages": _lines(["apt-mark", "showhold"]),
        "python_packages": _python_packages(sys.executable),
        "engine_python_packages": _python_packages(options.engine_python),
        "bundle_sha256": _bundle_checksums(options.bundle),
        "requirements_sha256": _requirement_hashes(options.bundle),
    }


def _os_name() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.split("=", 1)[1].strip('"')
    return "unknown"


def _efa_version() -> str | None:
    record = Path("/opt/amazon/efa_installed_packages")
    if not record.exists():
        return None
    return record.read_text().splitlines()[0].rpartition(":")[2].strip()


def _debian_packages() -> dict[str, str]:
    rows = _lines(["dpkg-query", "-W", "-f", "${Package}:${Architecture} ${Version}\n"])
    return dict(row.split(" ", 1) for row in rows)


def _python_packages(interpreter: str) -> dict[str, str]:
    found = subprocess.run([interpreter, "-c", _LIST_PACKAGES], check=True, capture_output=True, text=True, timeout=60)
    packages: dict[str, str] = json.loads(found.stdout)
    return packages


def _bundle_checksums(bundle: Path) -> dict[str, str]:
    rows = (bundle / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (row.split("  ", 1) for row in rows)}
    return sums | {"SHA256SUMS": hashlib.sha256((bundle / "SHA256SUMS").read_bytes()).hexdigest()}


def _requirement_hashes(bundle: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in ("requirements.txt", "engine-requirements.txt"):
        file = bundle / name
        for line in file.read_text().splitlines() if file.exists() else ():
            package, *hashes = line.split(" --hash=sha256:")
            found[package.strip()] = [digest.strip() for digest in hashes]
    return found


def _lines(argv: list[str]) -> list[str]:
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    return sorted(done.stdout.splitlines())


if __name__ == "__main__":
    main()
