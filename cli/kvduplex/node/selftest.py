"""The boot self-test: does this machine still have what its image was made of, and what its role needs?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from kvduplex.node.config import NodeConfig
from kvduplex.node.engine import backend_of
from kvduplex.node.manifest import ImageManifest
from kvduplex_transfer.hostchecks.findings import fail, ok
from kvduplex_transfer.interface import Finding, Host

__all__ = ["image_findings", "node_findings"]

_DPKG = ("dpkg-query", "-W", "-f", "${Package}:${Architecture} ${Version}\n")
_VERSIONS = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}))"
)
_LISTING_S = 60.0


def image_findings(manifest: ImageManifest, host: Host) -> tuple[Finding, ...]:
    """Whether the machine still has the versions that its image was made and tested with."""
    return (*_held(manifest, host), _python(manifest, host))


def node_findings(config: NodeConfig, manifest: ImageManifest, host: Host) -> tuple[Finding, ...]:
    """Whether the machine fits its role: its backend's own checks; nothing for a pure router."""
    if config.backend is None:
        return ()
    return backend_of(config, interpreter=manifest.engine_python).probe(host).findings


def _held(manifest: ImageManifest, host: Host) -> Iterator[Finding]:
    expected = {
        name: version
        for name, version in manifest.debian_packages.items()
        if name.partition(":")[0] in manifest.held_packages
    }
    if not expected:
        return
    found = _rows(host.run(_DPKG, _LISTING_S).stdout)
    moved = [f"{name} {found.get(name, 'missing')}" for name in sorted(expected) if found.get(name) != expected[name]]
    wanted = "the versions in the image manifest"
    if moved:
        yield fail(
            "image.held_packages",
            ", ".join(moved),
            wanted,
            why="driver, runtime and engine were tested together; an upgrade of one parts them",
            fix="replace this machine by one from the image, or make a new image with the new versions",
        )
    else:
        yield ok("image.held_packages", f"{len(expected)} packages unchanged", wanted)


def _python(manifest: ImageManifest, host: Host) -> Finding:
    listing = host.run((manifest.engine_python, "-c", _VERSIONS), _LISTING_S)
    expected = "the packages in the image manifest"
    if listing.returncode != 0:
        return fail(
            "image.engine_python",
            f"{manifest.engine_python}: {listing.stderr.strip()[-200:] or f'status {listing.returncode}'}",
            expected,
            why="no engine can start",
            fix="replace this machine by one from the image",
        )
    found: Mapping[str, str] = json.loads(listing.stdout)
    wanted = manifest.engine_python_packages
    moved = [f"{name} {found.get(name, 'missing')}" for name in sorted(wanted) if found.get(name) != wanted[name]]
    if moved:
        return fail(
            "image.engine_python",
            ", ".join(moved[:10]),
            expected,
            why="the engine was tested with these versions alone",
            fix="replace this machine by one from the image",
        )
    return ok("image.engine_python", f"{len(wanted)} packages unchanged", expected)


def _rows(text: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
