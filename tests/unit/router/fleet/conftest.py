"""What members of a fleet are carried out on, where no engine is needed."""

from __future__ import annotations

import pytest

from kvduplex_router.fleet.members import Member


class Present:
    """What members are carried out on."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def join(self, _source: str, member: Member) -> None:
        self.names.add(member.config.name)

    def leave(self, name: str) -> None:
        self.names.discard(name)

    def mark(self, name: str, *, leaving: bool) -> None:
        raise AssertionError(name)


@pytest.fixture
def present() -> Present:
    """Nobody yet."""
    return Present()
