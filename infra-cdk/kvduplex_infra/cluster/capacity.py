"""Where an engine fleet's instances come from."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints, field_validator

from kvduplex_infra.cluster.section import Section, Zone

__all__ = ["Capacity", "CapacityBlock", "OnDemand", "Reservation"]

ReservationId = Annotated[str, StringConstraints(pattern=r"^cr-[0-9a-f]{8,17}$")]


class OnDemand(Section):
    """Whatever EC2 has; large accelerator types are often short."""

    kind: Literal["on_demand"] = "on_demand"


class Reservation(Section):
    """An On-Demand Capacity Reservation of the account, targeted by id."""

    kind: Literal["reservation"]
    id: ReservationId
    zone: Zone
    """Zone the reservation lies in."""
    placement_group: str | None = None
    """Cluster placement group the reservation was made in, when it was; EC2 matches only that one."""


class CapacityBlock(Section):
    """A Capacity Block for ML: paid in advance, and gone at its end."""

    kind: Literal["block"]
    id: ReservationId
    zone: Zone
    """Zone the block lies in."""
    ends: AwareDatetime
    """End of the block, as EC2 shows it; instances are reclaimed from 30 minutes before."""

    @field_validator("ends")
    @classmethod
    def _whole_minutes(cls, value: datetime) -> datetime:
        if value.second or value.microsecond:
            raise ValueError("must be whole minutes; Capacity Blocks end at 11:30 UTC")
        return value


Capacity = Annotated[OnDemand | Reservation | CapacityBlock, Field(discriminator="kind")]
"""One of the three, told apart by ``kind``."""
