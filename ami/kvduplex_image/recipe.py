"""What an image is made of: one YAML file a flavour, every key known, nothing invented.

A checksum or version that the project cannot know has no default: building without it is refused.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from kvduplex_image.errors import RecipeError
from kvduplex_transfer.strictyaml import parse_yaml

__all__ = ["CloudWatchAgent", "Efa", "Engine", "Flavour", "ImageRecipe", "Neuron", "Parent", "load_recipe"]


_CUDA_PYTHON = "/opt/kvduplex/engine/bin/python"


class Flavour(StrEnum):
    """Which accelerator an image is for."""

    NEURON = "neuron"
    CUDA = "cuda"
    CPU = "cpu"


Fingerprint = Annotated[str, StringConstraints(pattern=r"^[0-9A-F]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
HttpsUrl = Annotated[str, StringConstraints(pattern=r"^https://[^\s/]+[^\s]*[^\s/]$")]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\s]*$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parent(_Section):
    """The image to start from: an id, or the SSM parameter that names it; exactly one."""

    ami: Annotated[str, StringConstraints(pattern=r"^ami-[0-9a-f]{8,17}$")] | None = None
    ssm_parameter: Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9_./-]+$")] | None = None
    """``latest`` parameters drift: they are resolved once, when the image is rendered, and the id is recorded."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.ami is None) == (self.ssm_parameter is None):
            raise ValueError("give exactly one of ami and ssm_parameter")
        return self


class Efa(_Section):
    """AWS's EFA installer. Key and fingerprint: EC2 user guide, "Get started with EFA and MPI"."""

    installer_version: Version
    url: HttpsUrl = "https://efa-installer.amazonaws.com"
    key_fingerprint: Fingerprint = "4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC"
    sha256: Sha256 | None = None
    """Digest of the archive, on top of the signature."""


class CloudWatchAgent(_Section):
    """AWS's CloudWatch agent. Key: CloudWatch user guide, "Verifying the signature of the CloudWatch agent package"."""

    version: Annotated[str, StringConstraints(pattern=r"^1\.3\d{5}\.\d+b\d+$")]
    """With its build number, as packages are published: ``1.300072.0b1766``."""
    url: HttpsUrl = "https://amazoncloudwatch-agent.s3.amazonaws.com"
    key_fingerprint: Fingerprint = "937616F3450B7D806CBD9725D58167303B789C72"
    sha256: Sha256 | None = None
    """Digest of the package, on top of the signature."""


class Neuron(_Section):
    """Neuron SDK packages: the parent's, or pinned ones of the Neuron apt repository."""

    packages: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9.+-]+=[A-Za-z0-9.+~:-]+$")], ...] = ()
    """``name=version``; empty keeps the parent's."""
    apt_url: HttpsUrl = "https://apt.repos.neuron.amazonaws.com"
    key_fingerprint: Fingerprint = "00FA2C1079260870A76D2C285749CAD8646D9185"


class Engine(_Section):
    """Where the engine's Python packages come from."""

    python: AbsolutePath | None = None
    """Interpreter of a virtual environment that the parent brings; the image's own when not given."""
    requirements: str | None = None
    """File beside the recipe, each line pinned and with ``--hash=sha256:``."""


class ImageRecipe(_Section):
    """One image."""

    flavour: Flavour
    version: Version
    parent: Parent
    instance_type: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+\.[a-z0-9]+$")]
    """Type to build on; it needs the accelerator only where a layer checks it."""
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")]
    copy_to: tuple[str, ...] = ()
    """Further regions the image is copied to."""
    volume_gib: Annotated[int, Field(ge=20, le=16_384)] = 200
    efa: Efa | None = None
    cloudwatch_agent: CloudWatchAgent | None = None
    """Without it, logs and host metrics stay on the machines."""
    neuron: Neuron | None = None
    engine: Engine = Engine()
    package_index: HttpsUrl | None = None
    """Index for Python packages; pip's own configuration on the build machine when not given."""

    @model_validator(mode="after")
    def _flavour_has_its_sections(self) -> Self:
        if (self.flavour is Flavour.NEURON) != (self.neuron is not None):
            raise ValueError("neuron: this section belongs to flavour neuron, and is needed there")
        if self.flavour is not Flavour.CPU and self.efa is None:
            raise ValueError(f"efa: flavour {self.flavour} needs it; give efa.installer_version")
        if self.flavour is Flavour.NEURON and self.engine.python is None:
            raise ValueError(
                "engine.python: flavour neuron runs in the virtual environment of its parent; name its interpreter"
            )
        if self.flavour is not Flavour.CPU and self.engine.requirements is None:
            raise ValueError(
                "engine.requirements: name a file of pinned packages with their checksums (docs/ami.md says how to "
                "make it); the engine's packages are not installed without"
            )
        return self

    @property
    def name(self) -> str:
        """Name of images built from this recipe, without a date, e.g. ``kvduplex-neuron-0.1.0``."""
        return f"kvduplex-{self.flavour}-{self.version}"

    @property
    def layers(self) -> tuple[str, ...]:
        """Provisioning scripts to run, in order."""
        efa = ("efa",) if self.efa else ()
        cloudwatch = ("cloudwatch",) if self.cloudwatch_agent else ()
        return ("base", *efa, *cloudwatch, self.flavour.value, "kvduplex")

    @property
    def engine_python(self) -> str | None:
        """Interpreter of the engine where it has a virtual environment of its own."""
        # Apart from the router's, so that the engine's pins never have to agree with it.
        return self.engine.python or (_CUDA_PYTHON if self.flavour is Flavour.CUDA else None)

    def settings(self, *, parent_image: str) -> dict[str, str]:
        """Environment of the provisioning scripts, given the id that `parent` resolved to."""
        settings = {"FLAVOUR": self.flavour.value, "IMAGE_VERSION": self.version, "PARENT_IMAGE": parent_image}
        if self.efa:
            settings |= {
                "EFA_INSTALLER_VERSION": self.efa.installer_version,
                "EFA_INSTALLER_URL": self.efa.url,
                "EFA_KEY_FINGERPRINT": self.efa.key_fingerprint,
                "EFA_INSTALLER_SHA256": self.efa.sha256 or "",
            }
        if self.cloudwatch_agent:
            settings |= {
                "CLOUDWATCH_AGENT_VERSION": self.cloudwatch_agent.version,
                "CLOUDWATCH_AGENT_URL": self.cloudwatch_agent.url,
                "CLOUDWATCH_AGENT_KEY_FINGERPRINT": self.cloudwatch_agent.key_fingerprint,
                "CLOUDWATCH_AGENT_SHA256": self.cloudwatch_agent.sha256 or "",
            }
        if self.neuron:
            settings |= {
                "NEURON_PACKAGES": " ".join(self.neuron.packages) or "parent",
                "NEURON_APT_URL": self.neuron.apt_url,
                "NEURON_KEY_FINGERPRINT": self.neuron.key_fingerprint,
            }
        if self.engine_python:
            settings["ENGINE_PYTHON"] = self.engine_python
        if self.package_index:
            settings["PACKAGE_INDEX"] = self.package_index
        return {key: value for key, value in sorted(settings.items()) if value}


def load_recipe(path: Path) -> ImageRecipe:
    """Read an image recipe.

    Raises:
        RecipeError: The file is missing, is no YAML mapping, or a key or value in it is wrong.
    """
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: holds no mapping of keys to values")
    try:
        return ImageRecipe.model_validate(values)
    except ValidationError as error:
        lines = (_line(item["loc"], item["msg"], item["type"]) for item in error.errors(include_url=False))
        raise RecipeError("\n".join(f"{path}: {line}" for line in lines)) from error


def _line(place: tuple[int | str, ...], message: str, kind: str) -> str:
    key = ".".join(str(part) for part in place)
    text = "unknown key" if kind == "extra_forbidden" else message.removeprefix("Value error, ")
    return f"{key}: {text}" if key else text
