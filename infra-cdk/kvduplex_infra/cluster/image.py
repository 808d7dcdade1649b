"""Which machine image a fleet starts from: always one that cannot drift between two deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from kvduplex_infra.cluster.section import Section

__all__ = ["Image"]

AmiId = Annotated[str, StringConstraints(pattern=r"^ami-[0-9a-f]{8,17}$")]


class Image(Section):
    """Exactly one of an id, a version of an SSM parameter, and an image manifest."""

    id: AmiId | None = None
    ssm_parameter: Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9_./-]{1,1000}$")] | None = None
    """Parameter that holds the id, as the image stack writes it."""
    ssm_version: Annotated[int, Field(ge=1)] | None = None
    """Version of the parameter. Needed: without it a later image build would change running clusters."""
    manifest: Path | None = None
    """Manifest that the image build wrote; the id of the cluster's region is read from it."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("id", "ssm_parameter", "manifest") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of id, ssm_parameter and manifest, got {', '.join(given) or 'none'}")
        if (self.ssm_parameter is None) != (self.ssm_version is None):
            raise ValueError("ssm_parameter and ssm_version belong together: an unversioned parameter drifts")
        return self
