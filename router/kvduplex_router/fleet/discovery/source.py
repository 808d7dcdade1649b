"""What a source of engines is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvduplex_router.fleet.members import Member

__all__ = ["DiscoveryError", "Source"]


class DiscoveryError(Exception):
    """A source could not be read; what it listed before stays."""


class Source(Protocol):
    """A place where engines are listed.

    Attributes:
        name: For operators.
        interval_s: Seconds between looks.
        missing_after: Looks in a row that must not find an engine before it is let go.
    """

    name: str
    interval_s: float
    missing_after: int

    async def look(self) -> Sequence[Member]:
        """What is listed now.

        Raises:
            DiscoveryError: It cannot be read.
        """

    async def close(self) -> None:
        """Let go of what it holds."""
