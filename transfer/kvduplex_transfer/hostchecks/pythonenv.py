"""What is installed in the Python environment that engines run in, read from its files: nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType

from kvduplex_transfer.hostchecks.findings import fail, ok
from kvduplex_transfer.interface import Finding, Host

__all__ = ["Distribution", "PythonEnvironment", "check_placeholders", "read_environment"]

_PLACEHOLDER = "WRONG PACKAGE"  # how the Neuron packages on the public index describe themselves
_DIST_INFO = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)\.dist-info$")


@dataclass(frozen=True, slots=True)
class Distribution:
    """One installed distribution.

    Attributes:
        name: Normalised name, e.g. ``vllm-neuron``.
        version: As installed, with its local part, e.g. ``2.10.0+cu130``.
        folder: Its ``.dist-info`` folder.
    """

    name: str
    version: str
    folder: str


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """The environment of one interpreter.

    Attributes:
        interpreter: Path of the interpreter, as configured.
        packages: Its ``site-packages`` folder; empty when there is none.
        distributions: What is installed, by normalised name.
    """

    interpreter: str
    packages: str
    distributions: Mapping[str, Distribution]

    def version(self, name: str) -> str | None:
        """Installed version of `name`, or None."""
        found = self.distributions.get(name)
        return found.version if found else None


def read_environment(host: Host, interpreter: str) -> PythonEnvironment:
    """List the distributions of the environment that `interpreter` belongs to."""
    prefix = PurePosixPath(interpreter).parent.parent
    for pattern in (f"{prefix}/lib/python3*/site-packages", f"{prefix}/lib/python3*/dist-packages"):
        for folder in host.glob(pattern):
            found = dict(_distributions(host, folder))
            if found:
                return PythonEnvironment(interpreter, folder, MappingProxyType(found))
    return PythonEnvironment(interpreter, "", MappingProxyType({}))


def check_placeholders(
    host: Host, environment: PythonEnvironment, names: tuple[str, ...], *, fix: str
) -> list[Finding]:
    """Find names of Neuron packages that are installed from the public index, where they are empty.

    Args:
        host: Machine to read.
        environment: Where engines run.
        names: Distributions whose public namesake is empty.
        fix: How to get the real ones.
    """
    installed = [environment.distributions[name] for name in names if name in environment.distributions]
    hollow = [found for found in installed if _is_placeholder(host, found)]
    if not hollow:
        return [ok("python.placeholder", f"{len(installed)} Neuron packages, none empty", "real Neuron wheels")]
    return [
        fail(
            "python.placeholder",
            f"{found.name} {found.version} ({found.folder}) is the empty package of the public index",
            "the wheel of the Neuron repository",
            why="it has no code: the engine would start without the Neuron platform",
            fix=fix,
        )
        for found in hollow
    ]


def _distributions(host: Host, folder: str) -> list[tuple[str, Distribution]]:
    found = []
    for path in host.glob(f"{folder}/*.dist-info"):
        match = _DIST_INFO.match(PurePosixPath(path).name)
        if match:
            name = re.sub(r"[-_.]+", "-", match["name"]).lower()
            found.append((name, Distribution(name, match["version"], path)))
    return found


def _is_placeholder(host: Host, distribution: Distribution) -> bool:
    return _PLACEHOLDER in (host.read_text(f"{distribution.folder}/METADATA") or "")
