"""The exact set of Python packages an image gets: the closure of our extras over the environment the tests ran in."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from kvduplex_image.checksums import sha256_of
from kvduplex_image.errors import ImageError

__all__ = ["KEPT_OUT", "check_installed", "closure", "hashed_requirements", "wheel_hashes"]

KEPT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "nixl-cu13"})
"""Packages that requirements name but an image must not have.

The newest torchvision, torchaudio and torchcodec do not load beside the CPU build of torch ("operator
torchvision::nms does not exist"); nixl-cu13 is a second copy of the same host transports.
"""


def closure(root: str, extras: Iterable[str]) -> Mapping[str, str]:
    """Version of every package that `root` with `extras` needs here, by canonical name, without `root` itself.

    Raises:
        ImageError: A needed package is not installed, so its version cannot be pinned.
    """
    pins: dict[str, str] = {}
    todo = _requirements(_installed(root, "asked for"), set(extras))
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen or name in KEPT_OUT or name == canonicalize_name(root):
            continue
        seen.add(key)
        found = _installed(name, f"needed as {requirement}")
        pins[name] = found.version
        todo += _requirements(found, set(requirement.extras))
    return dict(sorted(pins.items()))


def check_installed(project: Path, extras: Iterable[str]) -> None:
    """Refuse an environment that was made before `project` (a ``pyproject.toml``) asked for what it asks for now.

    `closure` reads what is installed, and would leave out what was added since.

    Raises:
        ImageError: A requirement of the project or of one of `extras` is unknown to the installed package.
    """
    table = tomllib.loads(project.read_text())["project"]
    asked = [*table["dependencies"], *(line for extra in extras for line in table["optional-dependencies"][extra])]
    known = {_key(Requirement(text)) for text in _installed(table["name"], "asked for").requires or ()}
    if missing := sorted(text for text in asked if _key(Requirement(text)) not in known):
        raise ImageError(
            f"{project}: asks for {', '.join(missing)}, which this environment was made without; run `make setup`"
        )


def hashed_requirements(pins: Mapping[str, str], hashes: Mapping[str, Iterable[str]]) -> str:
    """A requirements file for ``pip install --require-hashes``.

    Args:
        pins: Version by canonical name.
        hashes: SHA-256 digests by canonical name.

    Raises:
        ImageError: A pinned package has no digest.
    """
    lines = []
    for name, version in sorted(pins.items()):
        digests = sorted(hashes.get(name, ()))
        if not digests:
            raise ImageError(
                f"{name}=={version}: no wheel of it in the wheel folder, so it cannot be pinned by checksum"
            )
        lines.append(" ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in digests)]))
    return "\n".join(lines) + "\n"


def wheel_hashes(folder: Path, pins: Mapping[str, str]) -> Mapping[str, list[str]]:
    """SHA-256 digests of the wheels in `folder` that have a pinned version, by canonical package name."""
    found: dict[str, list[str]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if pins.get(name) == str(version):
            found.setdefault(name, []).append(sha256_of(wheel))
    return found


def _installed(name: str, why: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise ImageError(
            f"{name} ({why}) is not installed here; run `make setup` and build the image from it"
        ) from error


def _key(requirement: Requirement) -> tuple[str, str]:
    return canonicalize_name(requirement.name), str(requirement.specifier)


def _requirements(found: Distribution, extras: set[str]) -> list[Requirement]:
    # A marker that names an extra holds when one of the extras satisfies it; the empty one stands for none.
    contexts = [{"extra": canonicalize_name(extra)} for extra in extras] + [{"extra": ""}]
    parsed = [Requirement(text) for text in found.requires or ()]
    return [r for r in parsed if r.marker is None or any(r.marker.evaluate(context) for context in contexts)]
