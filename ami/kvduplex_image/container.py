"""What the router's container is built from: one folder, every package in it pinned by checksum."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from kvduplex_image.errors import ImageError

__all__ = ["DOCKERFILE", "EXTRAS", "check_base", "write_context"]

DOCKERFILE = Path(__file__).resolve().parents[2] / "router" / "Dockerfile"
EXTRAS = ("router", "aws")
"""What a router needs: itself, and the way to its engines and secrets."""

_PINNED = re.compile(r"^[a-z0-9][a-z0-9./:_-]*@sha256:[0-9a-f]{64}$")


def check_base(image: str) -> str:
    """The base image, if it is named by digest.

    Raises:
        ImageError: It is not.
    """
    if not _PINNED.match(image):
        raise ImageError(
            f"base: {image} can be moved; name it by digest, NAME@sha256:DIGEST "
            "(`docker buildx imagetools inspect python:3.11-slim-bookworm` shows it)"
        )
    return image


def write_context(folder: Path, *, wheel: Path, requirements: str) -> None:
    """Make the folder that the container is built in; what was there goes.

    Args:
        folder: Where to.
        wheel: The built ``kvduplex-*.whl``.
        requirements: Pinned packages with checksums.

    Raises:
        ImageError: `folder` holds something else than an earlier context.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / DOCKERFILE.name).exists():
        raise ImageError(f"{folder}: holds something else; name an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(DOCKERFILE, folder / DOCKERFILE.name)
    shutil.copyfile(wheel, folder / wheel.name)
    (folder / "requirements.txt").write_text(requirements)
