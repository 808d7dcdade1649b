"""One thing that is wrong in a template, and the shape of a rule that finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvduplex_infra.checks.assembly import Assembly, Place

__all__ = ["Finding", "Rule"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rule: Stable id, e.g. ``interfaces.primary``.
        place: Stack and logical id.
        message: What was seen, and what it must be.
    """

    rule: str
    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.message}"


Rule = Callable[[Assembly], Iterator[Finding]]
