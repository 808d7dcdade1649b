"""What is worked out about a request, once, before any engine is compared: scorers only read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvduplex_router.routing.classes import Workload
from kvduplex_router.tokens.prompt import Prompt

__all__ = ["Facts"]


class Facts:
    """Facts of one request.

    Attributes:
        workload: Its class.
        prompt: Its prompt; None when no policy that applies looks at it.
        session: Key of its session; None when nothing names one.
        home: Key of its prompt's beginning, up to the class's boundary; None when it is not looked up.
        units: Hashes of the prompt in units, up to the boundary; what is remembered of it.
        overlaps: Prompt tokens that engines hold already, by engine, as far as is known; of others 0.
        remembered: The part of those that rests on the router's own memory.
        pullable: Prompt tokens that could be read from the decode engine that answered last.
    """

    __slots__ = ("home", "overlaps", "prompt", "pullable", "remembered", "session", "units", "workload")

    def __init__(
        self,
        workload: Workload,
        *,
        prompt: Prompt | None = None,
        session: int | None = None,
        home: int | None = None,
        units: Sequence[int] = (),
        overlaps: Mapping[str, int] | None = None,
        remembered: Mapping[str, int] | None = None,
    ) -> None:
        self.workload = workload
        self.prompt = prompt
        self.session = session
        self.home = home
        self.units = units
        self.overlaps = overlaps or {}
        self.remembered = remembered or {}
        self.pullable = 0

    @property
    def tokens(self) -> int:
        """Prompt tokens; 0 when they were not counted."""
        return 0 if self.prompt is None else self.prompt.count
