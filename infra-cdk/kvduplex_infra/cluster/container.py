"""The routers' container image, and how much of a machine each gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from kvduplex_infra.cluster.section import Section

__all__ = ["FARGATE_MEMORY_GIB", "Container"]

FARGATE_MEMORY_GIB: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {
        1: tuple(range(2, 9)),
        2: tuple(range(4, 17)),
        4: tuple(range(8, 31)),
        8: tuple(range(16, 61, 4)),
        16: tuple(range(32, 121, 8)),
    }
)
"""Memory that Fargate sells by number of vCPUs (ECS developer guide, "Task definition parameters for Fargate")."""

_ECR = re.compile(
    r"^(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/(?P<name>[a-z0-9._/-]+)@sha256:[0-9a-f]{64}$"
)


class Container(Section):
    """One router's container."""

    image: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.:-]+(/[a-z0-9._-]+)+@sha256:[0-9a-f]{64}$")]
    """``REGISTRY/NAME@sha256:DIGEST``: a tag can be moved, and would change a running cluster by itself."""
    vcpus: Annotated[int, Field(ge=1, le=16)] = 2
    memory_gib: Annotated[int, Field(ge=2, le=120)] = 4

    @model_validator(mode="after")
    def _fargate_sells_it(self) -> Self:
        if self.vcpus not in FARGATE_MEMORY_GIB:
            nearest = min(FARGATE_MEMORY_GIB, key=lambda vcpus: abs(vcpus - self.vcpus))
            raise ValueError(f"vcpus {self.vcpus}: Fargate sells {_listed(FARGATE_MEMORY_GIB)}; nearest: {nearest}")
        sold = FARGATE_MEMORY_GIB[self.vcpus]
        if self.memory_gib not in sold:
            nearest = min(sold, key=lambda gib: abs(gib - self.memory_gib))
            raise ValueError(
                f"memory_gib {self.memory_gib}: with {self.vcpus} vCPUs Fargate sells {_listed(sold)}; "
                f"nearest: {nearest}"
            )
        return self

    @property
    def ecr_region(self) -> str | None:
        """Region of the image's repository in Amazon ECR; None when it lies elsewhere."""
        found = _ECR.match(self.image)
        return None if found is None else found["region"]

    @property
    def repository_arn(self) -> str | None:
        """ARN of that repository, with ``PARTITION`` for the partition."""
        found = _ECR.match(self.image)
        return (
            None
            if found is None
            else f"arn:PARTITION:ecr:{found['region']}:{found['account']}:repository/{found['name']}"
        )


def _listed(values: object) -> str:
    return ", ".join(str(value) for value in values)  # type: ignore[attr-defined]
