"""What a launch template says for an image of the cluster file."""

from __future__ import annotations

import json
from pathlib import Path

from kvduplex_infra.cluster.image import Image
from kvduplex_infra.errors import ClusterFileError

__all__ = ["image_reference"]


def image_reference(image: Image, *, region: str) -> str:
    """AMI id, or the versioned parameter that CloudFormation resolves to one when it deploys.

    Raises:
        ClusterFileError: The manifest cannot be read or holds no image of `region`.
    """
    if image.id is not None:
        return image.id
    if image.manifest is not None:
        return _from_manifest(image.manifest, region)
    return f"{{{{resolve:ssm:{image.ssm_parameter}:{image.ssm_version}}}}}"


def _from_manifest(path: Path, region: str) -> str:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ClusterFileError(f"image.manifest: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ClusterFileError(f"image.manifest: {path}: not JSON: {error}") from error
    images = values.get("images", {}) if isinstance(values, dict) else {}
    if region not in images:
        known = ", ".join(sorted(images)) or "none"
        raise ClusterFileError(f"image.manifest: {path} holds no image for region {region}; it holds: {known}")
    return str(images[region])
