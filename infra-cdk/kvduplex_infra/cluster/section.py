"""What every section of a cluster file has in common, and the spellings of AWS identifiers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

__all__ = ["Arn", "Email", "Section", "Zone"]

Arn = Annotated[str, StringConstraints(pattern=r"^arn:aws[a-z-]*:[a-z0-9-]+:[a-z0-9-]*:(\d{12})?:.+$")]
Email = Annotated[str, StringConstraints(pattern=r"^[^@\s]+@[^@\s]+\.[^@\s]+$")]
Zone = Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-\d[a-z]$")]


class Section(BaseModel):
    """Refuses unknown keys, so that a misspelt one stops the synthesis instead of being ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)
