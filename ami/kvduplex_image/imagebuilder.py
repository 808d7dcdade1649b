"""EC2 Image Builder documents of an image: one component a layer, and the recipe that lines them up.

The documents follow the AWSTOE component schema 1.0 (EC2 Image Builder user guide, "Use the AWSTOE component document
framework"). Their versions come from their content: a component with one byte changed is another version, since Image
Builder never replaces a published one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import yaml

from kvduplex_image.recipe import ImageRecipe

__all__ = ["Component", "components", "content_version", "image_recipe"]

_ON_MACHINE = "/var/tmp/kvduplex-bundle"  # noqa: S108 - on the build machine, which nobody else uses
_STEP_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Component:
    """One component.

    Attributes:
        name: Name in Image Builder.
        version: ``MAJOR.MINOR.PATCH``, derived from `data`.
        description: What it does.
        data: The YAML document.
    """

    name: str
    version: str
    description: str
    data: str


def components(recipe: ImageRecipe, *, bundle_url: str, bundle_sha256: str) -> tuple[Component, ...]:
    """Components of `recipe` in the order in which they run.

    Args:
        recipe: The image.
        bundle_url: ``s3://BUCKET/KEY`` of the bundle; the build instance must be allowed to read it.
        bundle_sha256: Its digest.
    """
    fetch = _component(recipe, "fetch", "Fetch and check the bundle", build=_fetch(bundle_url, bundle_sha256))
    layers = [
        _component(
            recipe, layer, f"Provision layer {layer}", build=[_bash("Provision", f"{_RUN} {layer}")], salt=bundle_sha256
        )
        for layer in recipe.layers
    ]
    seal = _component(
        recipe,
        "seal",
        "Test the image, then take out what machines must not share",
        build=[
            _bash("SelfTest", "kvduplex node selftest --image"),
            _bash("Seal", f"{_RUN} seal", f"rm -rf {_ON_MACHINE} {_ON_MACHINE}.tar.gz"),
        ],
        test=[_bash("SelfTestOfTheImage", "kvduplex node selftest --image")],
        salt=bundle_sha256,
    )
    return (fetch, *layers, seal)


def image_recipe(
    recipe: ImageRecipe, parts: tuple[Component, ...], *, parent_image: str, account: str
) -> dict[str, Any]:
    """Input of ``aws imagebuilder create-image-recipe --cli-input-json``; `account` owns the components."""
    prefix = f"arn:aws:imagebuilder:{recipe.region}:{account}:component"
    arns = [f"{prefix}/{part.name}/{part.version}" for part in parts]
    content = "\n".join([parent_image, str(recipe.volume_gib), *arns])
    return {
        "name": f"kvduplex-{recipe.flavour}",
        "semanticVersion": content_version(recipe.version, content),
        "parentImage": parent_image,
        "components": [{"componentArn": arn} for arn in arns],
        "blockDeviceMappings": [
            {
                "deviceName": "/dev/sda1",
                "ebs": {
                    "encrypted": True,
                    "deleteOnTermination": True,
                    "volumeSize": recipe.volume_gib,
                    "volumeType": "gp3",
                },
            }
        ],
        "additionalInstanceConfiguration": {"systemsManagerAgent": {"uninstallAfterBuild": False}},
        "tags": {"kvduplex:flavour": recipe.flavour.value, "kvduplex:version": recipe.version},
    }


def content_version(version: str, content: str) -> str:
    """MAJOR.MINOR of `version` with a patch number drawn from `content`; Image Builder takes up to 2**30 - 1."""
    major, minor, _ = version.split(".")
    digest = hashlib.sha256(f"{version}\n{content}".encode()).digest()
    return f"{major}.{minor}.{int.from_bytes(digest[:4], 'big') >> 2}"


_RUN = f"{_ON_MACHINE}/provision/run.sh"


def _fetch(url: str, sha256: str) -> list[dict[str, Any]]:
    archive = f"{_ON_MACHINE}.tar.gz"
    download = {
        "name": "Download",
        "action": "S3Download",
        "timeoutSeconds": _STEP_TIMEOUT_S,
        "onFailure": "Abort",
        "maxAttempts": 3,
        "inputs": [{"source": url, "destination": archive}],
    }
    unpack = _bash(
        "Unpack",
        f"echo '{sha256}  {archive}' | sha256sum --check --quiet",
        f"install -d -m 0755 {_ON_MACHINE}",
        f"tar -xzf {archive} -C {_ON_MACHINE} --no-same-owner",
    )
    return [download, unpack]


def _bash(name: str, *commands: str) -> dict[str, Any]:
    return {
        "name": name,
        "action": "ExecuteBash",
        "timeoutSeconds": _STEP_TIMEOUT_S,
        "onFailure": "Abort",
        "inputs": {"commands": ["set -euo pipefail", *commands]},
    }


def _component(
    recipe: ImageRecipe,
    layer: str,
    description: str,
    *,
    build: list[dict[str, Any]],
    test: list[dict[str, Any]] | None = None,
    salt: str = "",
) -> Component:
    phases = [{"name": "build", "steps": build}]
    if test:
        phases.append({"name": "test", "steps": test})
    name = f"kvduplex-{recipe.flavour}-{layer}"
    document = {"name": name, "description": description, "schemaVersion": 1.0, "phases": phases}
    data = yaml.safe_dump(document, sort_keys=False, width=1000)
    # The scripts live in the bundle, so a change there is a change of the component.
    return Component(name, content_version(recipe.version, f"{data}\n{salt}"), description, data)
