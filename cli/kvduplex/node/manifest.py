"""The image manifest, as far as a running machine needs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvduplex.node.errors import ManifestError

__all__ = ["MANIFEST_FILE", "ImageManifest"]

MANIFEST_FILE = Path("/usr/share/kvduplex/manifest.json")
"""Written when the image was made."""


class ImageManifest(BaseModel):
    """What this machine's image was made of; further keys are for readers."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    flavour: str
    version: str
    engine_python: str
    """Interpreter of the virtual environment that has vLLM."""
    efa_installer: str | None = None
    held_packages: tuple[str, ...] = ()
    debian_packages: Mapping[str, str] = {}
    """Version by ``NAME:ARCHITECTURE``."""
    python_packages: Mapping[str, str] = {}
    engine_python_packages: Mapping[str, str] = {}

    @classmethod
    def of_this_process(cls) -> Self:
        """What stands for a manifest where no engine runs, as in a router's container."""
        return cls(flavour="none", version="none", engine_python=sys.executable)

    @classmethod
    def read(cls, path: Path = MANIFEST_FILE) -> Self:
        """Read the manifest.

        Raises:
            ManifestError: It is missing or damaged.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ManifestError(
                f"{path}: {error.strerror}; this machine was not made from a kvduplex image, or not completely"
            ) from error
        except ValidationError as error:
            raise ManifestError(f"{path}: damaged ({error.error_count()} problems); make the image again") from error
